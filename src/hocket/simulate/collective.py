"""Time of a planned collective for messages of any size: rounds over shared channels.

Each tree's fraction of the message is split into equal chunks. A send has level l if l sends must
come before it, and moves chunk r - l in round r. A round takes as long as its busiest channel
needs, and each level adds its latency once, since chunks follow each other without waiting for
replies. With one chunk this is the textbook time of a ring, 2(n-1)(a + m/(n b)); with many chunks,
that of a pipelined tree. Chunks are as small as possible while `MAX_CHUNKS_IN_FLIGHT` of them keep
a hop busy over its latency; smaller ones would leave links idle. O(sends + levels · channels).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.hardware.cluster import Cluster
from hocket.plan.sections.communication import Communication, Send, Tree, channel

MAX_CHUNKS = 2**15
"""Largest number of chunks of a message."""
MAX_CHUNKS_IN_FLIGHT = 8
"""Chunks that may be in flight over one hop, equal to NCCL's eight slots."""


@dataclass(frozen=True)
class ChunkSpan:
    """Transfer of one chunk of one tree between two ranks."""

    tree: int
    chunk: int
    send: Send
    start_s: float
    end_s: float


class CollectiveTimes:
    """Times of a communication section for any message size, computed from levels and channel
    loads."""

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

    @property
    def longest_s(self) -> float:
        """Sum over levels of the largest latency, which is the time of an empty message."""
        return float(self.latency_s.sum())

    def num_chunks(self, size_bytes: float) -> int:
        """Return the largest number of chunks per tree that still keeps every hop busy."""
        slowest_s = float(self.latency_s.max()) / MAX_CHUNKS_IN_FLIGHT
        # Without latency nothing is lost by smaller chunks.
        if slowest_s == 0.0:
            return MAX_CHUNKS
        return int(min(max(size_bytes / self.rate_bps / slowest_s, 1.0), MAX_CHUNKS))

    def round_s(self, size_bytes: float, num_chunks: int) -> FloatArray:
        """Return the duration of each round."""
        return self._some_rounds(
            np.arange(self.num_levels + num_chunks - 1, dtype=np.int32), size_bytes, num_chunks
        )

    def _some_rounds(self, last: IntArray, size_bytes: float, num_chunks: int) -> FloatArray:
        # In round r, chunks r - n + 1 to r are in flight, so a level is busy in n rounds.
        first = np.maximum(last - num_chunks + 1, 0)
        last = np.minimum(last, self.num_levels - 1)
        busy = (self._until[:, last + 1] - self._until[:, first]).max(axis=0)
        rounds: FloatArray = busy * (size_bytes / num_chunks)
        return rounds

    def time_s(self, size_bytes: float, num_chunks: int | None = None) -> float:
        """Return the time at which the last rank has the result."""
        chunks = self.num_chunks(size_bytes) if num_chunks is None else num_chunks
        levels = self.num_levels
        if chunks <= levels:
            return float(self.round_s(size_bytes, chunks).sum()) + self.longest_s
        # The rounds between the first and the last ones are all equal, so one of them is counted
        # often.
        ends = np.concatenate((np.arange(levels), np.arange(chunks, chunks + levels - 1)))
        some = self._some_rounds(ends.astype(np.int32), size_bytes, chunks)
        return float(some.sum() + some[levels - 1] * (chunks - levels)) + self.longest_s

    def spans(self, size_bytes: float, num_chunks: int) -> Iterator[ChunkSpan]:
        """Yield every transfer of every chunk."""
        begins = np.concatenate(([0.0], np.cumsum(self.round_s(size_bytes, num_chunks))))
        late = np.concatenate(([0.0], np.cumsum(self.latency_s)))
        for index, levels in enumerate(self.levels):
            for level, send in levels:
                for chunk in range(num_chunks):
                    start_s = float(begins[level + chunk] + late[level])
                    end_s = float(begins[level + chunk + 1] + late[level + 1])
                    yield ChunkSpan(index, chunk, send, start_s, end_s)


def levels_of(tree: Tree) -> Iterator[tuple[int, Send]]:
    """Yield each send of a tree with its level: the number of sends that must come before it."""
    ready: dict[str, int] = defaultdict(int)
    for send in tree.reduce:
        yield ready[send.src], send
        ready[send.dst] = max(ready[send.dst], ready[send.src] + 1)
    has = {tree.root: ready[tree.root]}
    for send in tree.broadcast:
        yield has[send.src], send
        has[send.dst] = has[send.src] + 1
