"""Union-find (disjoint sets) over integers. Nearly O(1) per operation."""

from __future__ import annotations


class JoinedSets:
    """Disjoint sets of the integers below ``count``; initially each integer is a set of its own."""

    def __init__(self, count: int) -> None:
        self._above = list(range(count))

    def find(self, item: int) -> int:
        """Representative of an item's set."""
        above = self._above
        while above[item] != item:
            # Path halving: every second node of the path is attached to its grandparent.
            above[item] = above[above[item]]
            item = above[item]
        return item

    def join(self, item: int, other: int) -> None:
        """Merge two sets; the representative of ``item``'s set represents the result."""
        self._above[self.find(other)] = self.find(item)
