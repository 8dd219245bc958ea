"""Tables of one rank's part in a planned collective: which bytes go over which tree, to whom.

Every tree transports a range of the message, cut into chunks; chunks of all trees are numbered so
that all trees advance together, and the number is the priority. O(chunks + sends).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt

import numpy as np

from hocket.base.arrays import LongArray, pointers
from hocket.base.errors import UsageError
from hocket.plan.sections.communication import Communication, Tree

ADDABLE = ("float32", "float64", "int32", "int64", "bfloat16")
"""Types that trees can add, in the order of ``tree_executor.c``."""
MAX_CHILDREN = 64
"""Limit of children per rank and tree: their arrivals are the bits of one word."""
MIN_CHUNK_BYTES, MAX_CHUNK_BYTES = 1 << 12, 1 << 19
_CHUNK_S = 40e-6
"""Overhead of a chunk at every hop: two system calls and a context switch."""


@dataclass(frozen=True, eq=False)
class RankTables:
    """Tables of one rank; a peer is a rank, -1 nobody."""

    num_bytes: int
    chunk_tree: LongArray
    chunk_start: LongArray
    chunk_size: LongArray
    chunk_at: LongArray
    """Bytes of the same tree before it."""
    up_parent: LongArray
    up_ptr: LongArray
    up_child: LongArray
    scratch_at: LongArray
    """Per child: where what it sends is kept until it is added."""
    down_parent: LongArray
    down_ptr: LongArray
    down_child: LongArray
    num_scratch_bytes: int
    own: LongArray
    """Chunks that this rank contributes to."""
    wanted_finals: int
    last_chunk: int = -1
    """Empty, climbs when a rank has all others: by it the root knows; -1: none."""

    @property
    def num_chunks(self) -> int:
        """Of all trees."""
        return len(self.chunk_tree)

    @property
    def wanted_sends(self) -> int:
        """Messages that this rank sends."""
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
    section: Communication, rank: int, num_items: int, item_bytes: int, rate_bps: float,
    chunk_factor: float = 1.0,
) -> RankTables:  # fmt: skip
    """The tables of a rank for a message of so many items, at the rate that the plan promises.

    ``chunk_factor``: chunks in parts of the number that the model says.
    Of a gather or scatter the message is all shards, one after the other in the order of the ranks.
    """
    ranges = [(a * item_bytes, b * item_bytes) for a, b in ranges_of(section, num_items)]
    # All trees end together: each takes as long as the whole message at the rate of the plan.
    spent_s = max(num_items * item_bytes / rate_bps, 1e-9)
    chunks = []
    for index, (tree, (start, stop)) in enumerate(zip(section.trees, ranges, strict=True)):
        number = _num_chunks(_depth(tree), spent_s, stop - start, chunk_factor)
        ends = _cuts(start, stop, number, item_bytes)
        part = 1 / (len(ends) - 1)
        chunks += [((n + 0.5) * part, index, a, b) for n, (a, b) in enumerate(pairwise(ends))]
    # All trees advance together.
    return tables_of_chunks(section, rank, [chunk[1:] for chunk in sorted(chunks)])


def tables_of_chunks(
    section: Communication, rank: int, chunks: Sequence[tuple[int, int, int]]
) -> RankTables:
    """The tables for given chunks (tree, start, stop), the most urgent first."""
    chunks = list(chunks)
    last = _is_confirmed(section)
    trees = list(section.trees)
    if last:
        first = section.trees[0].broadcast
        back = tuple(type(send)(send.dst, send.src, send.hops) for send in reversed(first))
        trees.append(Tree(section.root, section.trees[0].share, reduce=back))
        chunks.append((len(trees) - 1, 0, 0))
    table = np.array(chunks, dtype=np.int64).reshape(-1, 3)
    chunk_at, sizes = _within_trees(chunks, len(trees))
    members = _members(section, trees, rank)
    kept = [sizes[tree] for tree, part in enumerate(members) for _ in part.up_child]
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
        chunk_at=chunk_at,
        up_parent=np.array([part.up_parent for part in members], dtype=np.int64),
        up_ptr=pointers([len(part.up_child) for part in members]),
        up_child=_flat([part.up_child for part in members]),
        scratch_at=pointers(kept)[:-1].copy(),
        down_parent=np.array([part.down_parent for part in members], dtype=np.int64),
        down_ptr=pointers([len(part.down_child) for part in members]),
        down_child=_flat([part.down_child for part in members]),
        num_scratch_bytes=sum(kept),
        own=own.astype(np.int64),
        wanted_finals=wanted - (last and section.ranks[rank] != section.root),
        last_chunk=len(chunks) - 1 if last else -1,
    )  # fmt: skip


def _within_trees(
    chunks: Sequence[tuple[int, int, int]], num_trees: int
) -> tuple[LongArray, list[int]]:
    """Per chunk the bytes of its tree before it, and the bytes of each tree."""
    sizes = [0] * num_trees
    before = []
    for tree, start, stop in chunks:
        before.append(sizes[tree])
        sizes[tree] += stop - start
    return np.array(before, dtype=np.int64), sizes


@dataclass
class _Member:
    """A rank's neighbours in one tree."""

    up_parent: int
    up_child: list[int]
    down_parent: int
    down_child: list[int]


def _members(section: Communication, trees: Sequence[Tree], rank: int) -> list[_Member]:
    number = {name: index for index, name in enumerate(section.ranks)}
    me, found = section.ranks[rank], []
    for tree in trees:
        part = _Member(-1, [], -1, [])
        for send in tree.reduce:
            if send.dst == me:
                part.up_child.append(number[send.src])
            if send.src == me:
                part.up_parent = number[send.dst]
        for send in tree.broadcast:
            if send.src == me:
                part.down_child.append(number[send.dst])
            if send.dst == me:
                part.down_parent = number[send.src]
        if len(part.up_child) > MAX_CHILDREN:
            raise UsageError(f"a rank has more than {MAX_CHILDREN} children in a tree")
        found.append(part)
    return found


def _is_confirmed(section: Communication) -> bool:
    """True if the root must know that all have it: else it could run ahead of those that lag."""
    return section.collective == "broadcast"


def ranges_of(section: Communication, num_items: int) -> list[tuple[int, int]]:
    """The items of each tree; those of one root stand together where every rank has a shard."""
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
        done = section.trees[0].share * 0
        for n in members:
            first = start + round(done * size)
            done += section.trees[n].share / whole
            ranges[n] = (first, start + round(done * size))
    return ranges


def _depth(tree: Tree) -> int:
    """Sends one after the other."""
    at: dict[str, int] = {}
    for send in tree.reduce:
        at[send.dst] = max(at.get(send.dst, 0), at.get(send.src, 0) + 1)
    down = {tree.root: at.get(tree.root, 0)}
    for send in tree.broadcast:
        down[send.dst] = down[send.src] + 1
    return max((*at.values(), *down.values()))


def _num_chunks(depth: int, spent_s: float, num_bytes: int, factor: float) -> int:
    """A pipeline fills for depth - 1 chunks, pays for each: C = sqrt((depth - 1) time / cost)."""
    best = factor * sqrt(max(depth - 1, 0) * spent_s / _CHUNK_S)
    return min(max(ceil(num_bytes / MAX_CHUNK_BYTES), round(best), 1),
               max(1, num_bytes // MIN_CHUNK_BYTES))  # fmt: skip


def _cuts(start: int, stop: int, num_chunks: int, item_bytes: int) -> list[int]:
    """Ends of the chunks of a range: all as large, but for whole items."""
    items = (stop - start) // item_bytes
    num_chunks = min(num_chunks, max(items, 1))
    return [start + items * n // num_chunks * item_bytes for n in range(num_chunks + 1)]


def _flat(lists: Sequence[Sequence[int]]) -> LongArray:
    return np.array([item for part in lists for item in part], dtype=np.int64)
