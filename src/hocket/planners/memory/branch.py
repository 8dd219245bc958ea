"""Branch on which of several ops runs first, with minimum cuts as bounds.

Of ops that nothing orders, every order runs one first; each choice adds precedences, under which
more ops lie before and after each peak, so its cut can only grow. The least bound over the open
choices is a bound for every order, stronger than any single cut, and each choice is also searched
for a better order (disjunctive branching, as Carlier and Pinson, 1989, do for job shops). Choices
are made between two ops at the peak, or among all that take the same bytes, such as the gradients
of equal layers; of those tried the one counts whose weakest way has the largest bound. O(choices ·
pairs · cuts).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.memory.cut import BETWEEN, OpCut, minimum_cut, sides_of
from hocket.planners.memory.refine import Found, WorkLeft, hoisted_both_ways, refined
from hocket.planners.memory.storages import Storages, preceded
from hocket.planners.memory.walk import memory_curve

_NUM_PEAKS = 10
"""Ops at the peak of which pairs are made."""
_NUM_SIZES, _MAX_EQUAL = 2, 24
"""Sizes of which equal ops are gathered, and how many of them."""


class Choice(NamedTuple):
    """Either a cut that holds under all precedences so far, or ways for each op to be the first."""

    bound_bytes: int
    cut: OpCut | None = None
    first_of: tuple[int, ...] = ()
    ways: tuple[Choice, ...] = ()
    """Per op of ``first_of``: it runs before all others of them."""


_Path = tuple[tuple[int, tuple[int, ...]], ...]
"""Choices made so far: which way, and among which ops."""


class _Open(NamedTuple):
    bound_bytes: int
    number: int
    path: _Path
    storages: Storages
    cut: OpCut
    order: LongArray


class _Way(NamedTuple):
    storages: Storages
    cut: OpCut


def branched(
    storages: Storages, found: Found, cut: OpCut, effort: WorkLeft
) -> tuple[Found, Choice]:
    """A better order as far as one is found, and the tree of choices that bounds every order."""
    best = found
    heap = [_Open(cut.num_bytes, 0, (), storages, cut, found.order)]
    chosen: dict[_Path, tuple[int, ...]] = {}
    count = 0
    while heap[0].bound_bytes < best.peak_bytes and effort.left > 0:
        node = heap[0]
        ops, ways = _best_choice(node, best.peak_bytes, effort)
        if not ops:
            break
        heapq.heappop(heap)
        chosen[node.path] = ops
        for at, way in enumerate(ways):
            count += 1
            bound = max(node.bound_bytes, way.cut.num_bytes)
            order = node.order
            if bound < best.peak_bytes:
                now = _searched(way.storages, node.order, bound, effort)
                best, order = min(best, now, key=lambda each: each.peak_bytes), now.order
            leaf = way.cut if way.cut.num_bytes >= node.bound_bytes else node.cut
            path = (*node.path, (at, ops))
            heapq.heappush(heap, _Open(bound, count, path, way.storages, leaf, order))
    ends = {node.path: Choice(node.bound_bytes, node.cut) for node in heap}
    return best, _tree((), chosen, ends)


def first_before(storages: Storages, ops: Sequence[int], first: int) -> Storages:
    """The same, for orders that run ``first`` before the others of ``ops``."""
    others = np.array([op for op in ops if op != first], dtype=np.int64)
    return preceded(storages, np.full(len(others), first), others)


def legal(storages: Storages, order: LongArray) -> LongArray:
    """The order with as few changes as further precedences need: smallest position first."""
    position = np.empty(storages.num_ops, dtype=np.int64)
    position[order] = np.arange(storages.num_ops)
    ways = storages.forwards
    waits = ways.num_waits.tolist()
    heap = [(int(position[op]), op) for op in range(storages.num_ops) if not waits[op]]
    heapq.heapify(heap)
    found = []
    while heap:
        _, op = heapq.heappop(heap)
        found.append(op)
        for other in ways.after[ways.after_ptr[op] : ways.after_ptr[op + 1]].tolist():
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(heap, (int(position[other]), other))
    return np.array(found, dtype=np.int64)


def _searched(storages: Storages, order: LongArray, bound: int, effort: WorkLeft) -> Found:
    now = hoisted_both_ways(storages, legal(storages, order), bound, effort)
    return refined(storages, now, bound, effort)


def _tree(path: _Path, chosen: dict[_Path, tuple[int, ...]], ends: dict[_Path, Choice]) -> Choice:
    if path not in chosen:
        return ends[path]
    ops = chosen[path]
    ways = tuple(_tree((*path, (at, ops)), chosen, ends) for at in range(len(ops)))
    return Choice(min(way.bound_bytes for way in ways), None, ops, ways)


def _best_choice(
    node: _Open, limit: int, effort: WorkLeft
) -> tuple[tuple[int, ...], tuple[_Way, ...]]:
    """The choice whose weakest way has the largest bound, with its ways; none where none helps."""
    best_rank = (node.bound_bytes, node.bound_bytes)
    best: tuple[tuple[int, ...], tuple[_Way, ...]] = ((), ())
    for ops in _possible(node):
        if best_rank[0] >= limit or effort.left <= 0:
            break
        ways = tuple(_way(node.storages, ops, first, effort) for first in ops)
        bounds = sorted(max(min(way.cut.num_bytes, limit), node.bound_bytes) for way in ways)
        rank = (bounds[0], bounds[1])
        if rank > best_rank:
            best, best_rank = (ops, ways), rank
    return best


def _way(storages: Storages, ops: tuple[int, ...], first: int, effort: WorkLeft) -> _Way:
    """What is left where ``first`` is the first of ops; of a pair the other's cut counts too."""
    limited = first_before(storages, ops, first)
    asked = ops if len(ops) == 2 else (first,)
    for _ in asked:
        effort.cut()
    cuts = [minimum_cut(limited, op) for op in asked]
    return _Way(limited, max(cuts, key=lambda cut: cut.num_bytes))


def _possible(node: _Open) -> Iterator[tuple[int, ...]]:
    """Sets of ops that nothing orders: pairs at the peak, and ops that take the same bytes."""
    curve = memory_curve(node.storages, node.order)
    falling = node.order[np.argsort(-curve, kind="stable")].tolist()
    peaks = list(dict.fromkeys((node.cut.op, *falling[:_NUM_PEAKS])))
    sides = {op: sides_of(node.storages.forwards, op) for op in peaks}
    yield from _equal_ops(node, falling)
    for first, second in combinations(peaks, 2):
        if sides[first][second] == BETWEEN:
            yield first, second


def _equal_ops(node: _Open, falling: list[int]) -> Iterator[tuple[int, ...]]:
    storages = node.storages
    taken = np.zeros(storages.num_ops, dtype=np.int64)
    np.add.at(taken, storages.producer, storages.num_bytes)
    sizes, counts = np.unique(taken[taken > 0], return_counts=True)
    for size in sizes[counts > 1][::-1][:_NUM_SIZES].tolist():
        apart: list[int] = []
        sides: list[LongArray] = []
        for op in (op for op in falling if taken[op] == size):
            if all(side[op] == BETWEEN for side in sides):
                apart.append(op)
                sides.append(sides_of(storages.forwards, op))
            if len(apart) == _MAX_EQUAL:
                break
        if len(apart) > 2:
            yield tuple(apart)
