"""Time of a planned collective for a message of some size: rounds over shared channels.

Each tree's share is cut into equal chunks. In round r a send of level l (sends that must come
before it) moves chunk r - l; the round lasts as long as its fullest channel needs, and every level
adds its latency once, since chunks follow each other without waiting for answers. With one chunk
this is the textbook time of a ring, 2(n-1)(a + m/(n b)); with many, that of a pipelined tree. Where
trees that run each at its own pace are sooner done (`overlapped`), that is the time.
Chunks are as small as `MAX_CHUNKS_IN_FLIGHT` of them on a hop can keep it busy over its latency:
with smaller ones messages and not bytes would set the pace. O(sends + levels · channels).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.hardware.cluster import Cluster
from hocket.plan.sections.communication import Communication, Send, Tree, channel

# Time of a collective whose trees each run at their own pace and all end together.
#
# Every send of a tree moves the tree's share at an even rate, from when the first chunk is there:
# the latencies and chunks before it, along its own path. A tree with short paths has more time to
# move its share than one with long paths, so that what is lost to latency is, on each channel, the
# mean over the channel's traffic and not the longest of all. The least time in which every
# channel keeps its rate is found by `scipy.optimize.brentq`. O(steps · channels · trees).

_CLOSE = 1e-12
"""Of the time in which it is found."""


@dataclass(frozen=True)
class TimedSend:
    """A send of a tree, with the latencies and chunks before it on its path."""

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
    """Duration of each send of each tree."""
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

        # The latest tree's time suffices for all trees; no tree has more time than all of it.
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


MAX_CHUNKS = 2**15
MAX_CHUNKS_IN_FLIGHT = 8
"""Chunks that may be in flight over one hop, as NCCL has eight slots for them."""


@dataclass(frozen=True)
class ChunkSpan:
    """Transfer of one chunk of one tree between two ranks."""

    tree: int
    chunk: int
    send: Send
    start_s: float
    end_s: float


class CollectiveTimes:
    """The levels and loads of a section, from which times for any size follow."""

    def __init__(self, section: Communication, cluster: Cluster) -> None:
        links = {link.name: link for link in cluster.links}
        self.section = section
        self.rate_bps = float(section.rate_bps(cluster))
        self.levels = [tuple(levels_of(tree)) for tree in section.trees]
        self.num_levels = 1 + max(level for levels in self.levels for level, _ in levels)
        self.latency_s: FloatArray = np.zeros(self.num_levels)
        seconds: dict[tuple[str, str], FloatArray] = defaultdict(lambda: np.zeros(self.num_levels))
        for tree, levels in zip(section.trees, self.levels, strict=True):
            for level, send in levels:
                latency_s = sum(links[name].latency_s for name, _, _ in send.hops)
                self.latency_s[level] = max(self.latency_s[level], latency_s)
                for name, src, _ in send.hops:
                    link = links[name]
                    seconds[channel(link, src)][level] += float(tree.share) / link.bandwidth_bps
        steps = np.stack(list(seconds.values()))
        self._until = np.concatenate((np.zeros((len(steps), 1)), np.cumsum(steps, axis=1)), axis=1)
        self._overlapped = OverlappedTimes(section, cluster)

    @property
    def longest_s(self) -> float:
        """Latencies along the longest path: what even an empty message takes."""
        return self._overlapped.longest_s

    def num_chunks(self, size_bytes: float) -> int:
        """Chunks of each tree: the most that keep every hop busy."""
        slowest_s = float(self.latency_s.max()) / MAX_CHUNKS_IN_FLIGHT
        if slowest_s == 0.0:
            return MAX_CHUNKS
        return int(min(max(size_bytes / self.rate_bps / slowest_s, 1.0), MAX_CHUNKS))

    def round_s(self, size_bytes: float, num_chunks: int) -> FloatArray:
        """Duration of each round."""
        return self._some_rounds(
            np.arange(self.num_levels + num_chunks - 1, dtype=np.int32), size_bytes, num_chunks
        )

    def _some_rounds(self, last: IntArray, size_bytes: float, num_chunks: int) -> FloatArray:
        first = np.maximum(last - num_chunks + 1, 0)
        last = np.minimum(last, self.num_levels - 1)
        busy = (self._until[:, last + 1] - self._until[:, first]).max(axis=0)
        rounds: FloatArray = busy * (size_bytes / num_chunks)
        return rounds

    def time_s(self, size_bytes: float, num_chunks: int | None = None) -> float:
        """When the last rank has everything."""
        chunks = self.num_chunks(size_bytes) if num_chunks is None else num_chunks
        paced_s = self._overlapped.pace(size_bytes, chunks).ends_s
        return min(paced_s, self._rounds_s(size_bytes, chunks))

    def _rounds_s(self, size_bytes: float, chunks: int) -> float:
        levels = self.num_levels
        if chunks <= levels:
            return float(self.round_s(size_bytes, chunks).sum() + self.latency_s.sum())
        # Between the first rounds and the last ones all are alike.
        ends = np.concatenate((np.arange(levels), np.arange(chunks, chunks + levels - 1)))
        some = self._some_rounds(ends.astype(np.int32), size_bytes, chunks)
        alike_s = some[levels - 1] * (chunks - levels)
        return float(some.sum() + alike_s + self.latency_s.sum())

    def spans(self, size_bytes: float, num_chunks: int) -> Iterator[ChunkSpan]:
        """Every transfer of every chunk, under the timing that ends first."""
        pace = self._overlapped.pace(size_bytes, num_chunks)
        if pace.ends_s < self._rounds_s(size_bytes, num_chunks):
            for each in self._overlapped.sends:
                for chunk, (start_s, end_s) in enumerate(pairwise(pace.moments_s(each).tolist())):
                    yield ChunkSpan(each.tree, chunk, each.send, start_s, end_s + each.latency_s)
            return
        begins = np.concatenate(([0.0], np.cumsum(self.round_s(size_bytes, num_chunks))))
        late = np.concatenate(([0.0], np.cumsum(self.latency_s)))
        for index, levels in enumerate(self.levels):
            for level, send in levels:
                for chunk in range(num_chunks):
                    step = level + chunk
                    yield ChunkSpan(
                        index, chunk, send,
                        float(begins[step] + late[level]),
                        float(begins[step + 1] + late[level + 1]),
                    )  # fmt: skip


def levels_of(tree: Tree) -> Iterator[tuple[int, Send]]:
    """Each send and how many must come before it."""
    ready: dict[str, int] = defaultdict(int)
    for send in tree.reduce:
        yield ready[send.src], send
        ready[send.dst] = max(ready[send.dst], ready[send.src] + 1)
    has = {tree.root: ready[tree.root]}
    for send in tree.broadcast:
        yield has[send.src], send
        has[send.dst] = has[send.src] + 1
