"""How long a collective takes when each tree runs at its own pace, all ending together.

Every send of a tree moves the tree's share at an even rate, from when the first chunk is there: the
latencies and chunks before it, along its own path. A tree with short paths has more time to move
its share than one with long paths, so that what is lost to latency is, on each channel, the mean
over what the channel carries and not the longest of all. The least time in which every channel
keeps its rate is found by `scipy.optimize.brentq`. O(steps · channels · trees).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.hardware.cluster import Cluster
from hocket.plan.sections.communication import Communication, Send, Tree, channel

_CLOSE = 1e-12
"""Of the time in which it is found."""


@dataclass(frozen=True)
class TimedSend:
    """A send of a tree, and what comes before it on its way."""

    tree: int
    send: Send
    before_s: float
    """Latencies."""
    level: int
    """Chunks."""
    latency_s: float


@dataclass(frozen=True)
class TreePace:
    """When sends move for a message of some size."""

    ends_s: float
    """When the last rank has everything."""
    moves_s: FloatArray
    """How long each send of each tree moves."""
    num_chunks: int

    def moments_s(self, each: TimedSend) -> FloatArray:
        """When each chunk of a send begins to move, and when the last has moved."""
        chunk_s = float(self.moves_s[each.tree]) / self.num_chunks
        chunks = np.arange(self.num_chunks + 1, dtype=np.float64)
        moments: FloatArray = each.before_s + chunk_s * (each.level + chunks)
        return moments


class OverlappedTimes:
    """The sends of a section and what trees take of the channels."""

    def __init__(self, section: Communication, cluster: Cluster) -> None:
        links = {link.name: link for link in cluster.links}
        count = len(section.trees)
        self.sends = [
            each
            for number, tree in enumerate(section.trees)
            for each in _timed(number, tree, {link.name: link.latency_s for link in cluster.links})
        ]
        self._late_s, self._level = np.zeros(count), np.zeros(count)
        taken: dict[tuple[str, str], FloatArray] = defaultdict(lambda: np.zeros(count))
        for each in self.sends:
            at_s = each.before_s + each.latency_s
            self._late_s[each.tree] = max(self._late_s[each.tree], at_s)
            self._level[each.tree] = max(self._level[each.tree], each.level)
            share = float(section.trees[each.tree].share)
            for name, src, _ in each.send.hops:
                taken[channel(links[name], src)][each.tree] += share / links[name].bandwidth_bps
        # Channels that trees take alike are one row.
        self._taken: FloatArray = np.unique(np.stack(list(taken.values())), axis=0)

    @property
    def longest_s(self) -> float:
        """Latencies along the longest path."""
        return float(self._late_s.max())

    def pace(self, size_bytes: float, num_chunks: int) -> TreePace:
        """The least time in which everything is moved so."""
        from scipy.optimize import brentq

        chunks = 1 + self._level / num_chunks
        busy_s = float((self._taken @ chunks).max()) * float(size_bytes)
        if busy_s == 0.0:
            return TreePace(self.longest_s, np.zeros(len(chunks)), num_chunks)

        # Added in this order, a rest far below the latencies is not rounded away to a zero divisor.
        spare_s = self.longest_s - self._late_s

        def overload(rest_s: float) -> float:
            moves_s = (spare_s + rest_s) / chunks
            return float((self._taken @ (size_bytes / moves_s)).max()) - 1.0

        # As late as the latest tree, all trees have room; no tree has more time than all of it.
        least_s = max(busy_s - self.longest_s, _CLOSE * busy_s)
        rest_s = busy_s
        if overload(least_s) > 0.0 > overload(busy_s):
            rest_s = brentq(overload, least_s, busy_s, xtol=_CLOSE * busy_s, rtol=1e-9)
            rest_s *= 1 + 2e-9
        ends_s = self.longest_s + rest_s
        return TreePace(ends_s, (spare_s + rest_s) / chunks, num_chunks)


def _timed(number: int, tree: Tree, latency_of: dict[str, float]) -> Iterator[TimedSend]:
    """The sends of a tree with what comes before each."""
    ready: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for send in (*tree.reduce, *tree.broadcast):
        before_s, level = ready[send.src]
        latency_s = sum(latency_of[name] for name, _, _ in send.hops)
        yield TimedSend(number, send, before_s, level, latency_s)
        there = ready[send.dst]
        ready[send.dst] = (max(there[0], before_s + latency_s), max(there[1], level + 1))
