"""Tables of one rank's part in a planned collective: byte ranges of chunks, and their neighbours.

Every tree transports a byte range of the message, cut into chunks. The tables state for each tree
this rank's parent and children, and for each chunk its byte range. A chunk's number is its
priority; numbers are assigned so that all trees progress equally. O(chunks + sends).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt

import numpy as np

from hocket.base.arrays import LongArray, pointers
from hocket.base.errors import UsageError
from hocket.plan.sections.communication import Communication, Send, Tree

ADDABLE = ("float32", "float64", "int32", "int64", "bfloat16")
"""Dtypes that the executor can sum, in the order of ``tree_executor.c``."""
MAX_CHILDREN = 64
"""Maximum children per rank and tree: their arrivals are the bits of one 64-bit integer."""
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 12, 1 << 19
_CHUNK_S = 40e-6
"""Overhead of a chunk at every hop in seconds: two system calls and a context switch."""


@dataclass(frozen=True, eq=False)
class RankTables:
    """Tables of one rank; in tables of peers, -1 means no peer."""

    num_bytes: int
    chunk_tree: LongArray
    chunk_start: LongArray
    chunk_size: LongArray
    chunk_at: LongArray
    """Offset of each chunk: bytes of earlier chunks of the same tree."""
    up_parent: LongArray
    up_ptr: LongArray
    up_child: LongArray
    scratch_at: LongArray
    """Offset of each child's scratch space, which holds received data until they are added."""
    down_parent: LongArray
    down_ptr: LongArray
    down_child: LongArray
    num_scratch_bytes: int
    own: LongArray
    """Chunks that this rank contributes to."""
    wanted_finals: int
    last_chunk: int = -1
    """Number of an empty chunk that ranks send up once they have all other chunks; -1 for none.

    It notifies the root of a broadcast that all ranks are done.
    """

    @property
    def num_chunks(self) -> int:
        """Number of chunks of all trees."""
        return len(self.chunk_tree)

    @property
    def wanted_sends(self) -> int:
        """Number of messages that this rank sends."""
        up = self.up_parent[self.chunk_tree] >= 0
        down = np.diff(self.down_ptr)[self.chunk_tree]
        return int(up.sum() + down.sum())

    def sends_to(self, num_ranks: int) -> LongArray:
        """Count the messages to each rank."""
        return self._messages(num_ranks, self.up_parent, self.down_ptr, self.down_child)

    def receives_from(self, num_ranks: int) -> LongArray:
        """Count the messages from each rank."""
        return self._messages(num_ranks, self.down_parent, self.up_ptr, self.up_child)

    def _messages(
        self, num_ranks: int, parent: LongArray, child_ptr: LongArray, child: LongArray
    ) -> LongArray:
        count = np.bincount(self.chunk_tree, minlength=len(parent))
        messages = np.zeros(num_ranks, dtype=np.int64)
        for tree, number in enumerate(count):
            if parent[tree] >= 0:
                messages[parent[tree]] += number
            np.add.at(messages, child[child_ptr[tree] : child_ptr[tree + 1]], number)
        return messages


def tables_of(
    section: Communication, rank: int, num_items: int, item_bytes: int, rate_bps: float
) -> RankTables:
    """Return the tables of a rank for a message of ``num_items``, at the rate of its plan.

    The message of a gather or scatter is the concatenation of all shards, in the order of the
    ranks.
    """
    ranges = [(a * item_bytes, b * item_bytes) for a, b in ranges_of(section, num_items)]
    # Shares are planned so that all trees end at the same time.
    spent_s = max(num_items * item_bytes / rate_bps, 1e-9)
    chunks = []
    for index, (tree, (start, stop)) in enumerate(zip(section.trees, ranges, strict=True)):
        number = _num_chunks(_depth(tree), spent_s, stop - start)
        items = (stop - start) // item_bytes
        # Each chunk has at least one item.
        number = min(number, max(items, 1))
        ends = [start + items * n // number * item_bytes for n in range(number + 1)]
        chunks += [((n + 0.5) / number, index, a, b) for n, (a, b) in enumerate(pairwise(ends))]
    # Sorted by the fraction of its tree that a chunk completes, so that trees progress equally.
    return tables_of_chunks(section, rank, [chunk[1:] for chunk in sorted(chunks)])


def tables_of_chunks(
    section: Communication, rank: int, chunks: Sequence[tuple[int, int, int]]
) -> RankTables:
    """Return the tables for given chunks (tree, start, stop), the most urgent first."""
    chunks = list(chunks)
    # The root of a broadcast receives nothing, and could otherwise start the next collectives
    # while other ranks are still busy with this one.
    last = section.collective == "broadcast"
    trees = list(section.trees)
    if last:
        first = section.trees[0].broadcast
        back = tuple(Send(send.dst, send.src, send.hops) for send in reversed(first))
        trees.append(Tree(section.root, section.trees[0].share, reduce=back))
        chunks.append((len(trees) - 1, 0, 0))
    table = np.array(chunks, dtype=np.int64).reshape(-1, 3)
    sizes, chunk_at = [0] * len(trees), list[int]()
    for tree, start, stop in chunks:
        chunk_at.append(sizes[tree])
        sizes[tree] += stop - start
    up_child, up_parent = _neighbours(section, rank, [tree.reduce for tree in trees])
    down_parent, down_child = _neighbours(section, rank, [tree.broadcast for tree in trees])
    if max(map(len, up_child), default=0) > MAX_CHILDREN:
        raise UsageError(f"a rank has more than {MAX_CHILDREN} children in a tree")
    kept = [sizes[tree] for tree, children in enumerate(up_child) for _ in children]
    reduces = section.collective in ("allreduce", "reduce", "reducescatter")
    at_root = np.array([tree.root == section.ranks[rank] for tree in trees])[table[:, 0]]
    own = (
        np.arange(len(chunks) - last) if reduces else np.flatnonzero(at_root[: len(chunks) - last])
    )
    ends_here = at_root if section.collective in ("reduce", "reducescatter") else None
    wanted = len(chunks) if ends_here is None else int(ends_here.sum())
    return RankTables(
        num_bytes=int(table[:, 2].max(initial=0)),
        chunk_tree=table[:, 0].copy(),
        chunk_start=table[:, 1].copy(),
        chunk_size=table[:, 2] - table[:, 1],
        chunk_at=np.array(chunk_at, dtype=np.int64),
        up_parent=_only(up_parent),
        up_ptr=pointers(list(map(len, up_child))),
        up_child=_flat(up_child),
        scratch_at=pointers(kept)[:-1].copy(),
        down_parent=_only(down_parent),
        down_ptr=pointers(list(map(len, down_child))),
        down_child=_flat(down_child),
        num_scratch_bytes=sum(kept),
        own=own.astype(np.int64),
        wanted_finals=wanted - (last and section.ranks[rank] != section.root),
        last_chunk=len(chunks) - 1 if last else -1,
    )  # fmt: skip


def _neighbours(
    section: Communication, rank: int, sends: Sequence[Sequence[Send]]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks that send to this rank, and those that it sends to, per tree."""
    number = {name: index for index, name in enumerate(section.ranks)}
    me = section.ranks[rank]
    return (
        [[number[send.src] for send in of_tree if send.dst == me] for of_tree in sends],
        [[number[send.dst] for send in of_tree if send.src == me] for of_tree in sends],
    )


def ranges_of(section: Communication, num_items: int) -> list[tuple[int, int]]:
    """Return the range of items of each tree; in collectives with shards, trees of one root cover
    the root's shard."""
    by_root = section.collective in ("allgather", "reducescatter")
    count = len(section.ranks)
    ranges = [(0, 0)] * len(section.trees)
    for group in range(count if by_root else 1):
        name = section.ranks[group]
        members = [n for n, t in enumerate(section.trees) if not by_root or t.root == name]
        start, size = (
            (num_items // count * group, num_items // count) if by_root else (0, num_items)
        )
        whole = sum(section.trees[n].share for n in members)
        # Zero of the shares' own type: exact fractions leave no gap between trees.
        done = section.trees[0].share * 0
        for n in members:
            first = start + round(done * size)
            done += section.trees[n].share / whole
            ranges[n] = (first, start + round(done * size))
    return ranges


def _depth(tree: Tree) -> int:
    """Return the depth of a tree: the longest chain of dependent sends."""
    at: dict[str, int] = {}
    for send in tree.reduce:
        at[send.dst] = max(at.get(send.dst, 0), at.get(send.src, 0) + 1)
    down = {tree.root: at.get(tree.root, 0)}
    for send in tree.broadcast:
        down[send.dst] = down[send.src] + 1
    return max((*at.values(), *down.values()))


def _num_chunks(depth: int, spent_s: float, num_bytes: int) -> int:
    """Return the number of chunks C that minimizes pipeline fill time plus chunk overheads.

    C = sqrt((depth - 1) time / overhead per chunk).
    """
    best = sqrt(max(depth - 1, 0) * spent_s / _CHUNK_S)
    return min(max(ceil(num_bytes / MAX_CHUNK_BYTES), round(best), 1),
               max(1, num_bytes // MIN_CHUNK_BYTES))  # fmt: skip


def _only(peers: Sequence[Sequence[int]]) -> LongArray:
    """Return the only peer of each tree; -1 if there is none."""
    return np.array([peer[0] if peer else -1 for peer in peers], dtype=np.int64)


def _flat(lists: Sequence[Sequence[int]]) -> LongArray:
    return np.array([item for part in lists for item in part], dtype=np.int64)
