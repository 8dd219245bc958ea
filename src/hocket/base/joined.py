"""Sets of numbers that are joined one by one (union-find). Nearly O(1) each."""

from __future__ import annotations


class JoinedSets:
    """The numbers below a count, each a set of its own until some are joined."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def find(self, item: int) -> int:
        """The member that stands for the set of an item."""
        above = self._above
        while above[item] != item:
            above[item] = above[above[item]]
            item = above[item]
        return item

    def join(self, item: int, other: int) -> None:
        """Make the sets of both one; what stood for that of ``item`` stands for both."""
        self._above[self.find(other)] = self.find(item)
