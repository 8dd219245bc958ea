"""How long a planned collective takes for a message of some size: rounds over shared channels.

Each tree's share is cut into equal chunks. In round r a send of level l (sends that must come
before it) moves chunk r - l; the round lasts as long as its fullest channel needs, and every level
adds its latency once, since chunks follow each other without waiting for answers. With one chunk
this is the textbook time of a ring, 2(n-1)(a + m/(n b)); with many, that of a pipelined tree. Where
trees that run each at its own pace are sooner done (`overlapped`), that is the time.
Chunks are as small as `MAX_ON_THE_WAY` of them at once on a hop can keep it busy over its latency:
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
from hocket.simulate.overlapped import OverlappedTimes

MAX_CHUNKS = 2**15
MAX_ON_THE_WAY = 8
"""Chunks that may be under way over one hop, as NCCL has eight slots for them."""


@dataclass(frozen=True)
class ChunkSpan:
    """One chunk of one tree on its way between two ranks."""

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
        slowest_s = float(self.latency_s.max()) / MAX_ON_THE_WAY
        if slowest_s == 0.0:
            return MAX_CHUNKS
        return int(min(max(size_bytes / self.rate_bps / slowest_s, 1.0), MAX_CHUNKS))

    def round_s(self, size_bytes: float, num_chunks: int) -> FloatArray:
        """How long each round lasts."""
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
        """Every chunk on every way, in the manner that ends first."""
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
