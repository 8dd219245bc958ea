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

from hocket.base.arrays import LongArray, positions
from hocket.planners.memory.cut import (
    BETWEEN,
    CutFlow,
    OpCut,
    Pairs,
    maximum_flow,
    minimum_cut,
    sides_of,
)
from hocket.planners.memory.legal import legal
from hocket.planners.memory.refine import Found, WorkLeft, hoisted_both_ways, refined
from hocket.planners.memory.storages import Storages, preceded
from hocket.planners.memory.walk import memory_curve

_NUM_PEAKS = 10
"""Ops at the peak of which pairs are made."""
_NUM_HELD = 24
"""Ops that are paired with that of the peak."""
_NUM_SIZES, _MAX_EQUAL = 2, 24
"""Sizes of which equal ops are gathered, and how many of them."""


class Choice(NamedTuple):
    """Either a flow that proves a cut under all precedences so far, or a way for each op to be the
    first."""

    bound_bytes: int
    flow: CutFlow | None = None
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


def branched(
    storages: Storages, found: Found, cuts: Sequence[OpCut], effort: WorkLeft
) -> tuple[Found, Choice]:
    """A better order as far as one is found, and the tree of choices that bounds every order.

    ``cuts`` are those known, the largest first.
    """
    best = found
    heap = [_Open(cuts[0].num_bytes, 0, (), storages, cuts[0], found.order)]
    chosen: dict[_Path, tuple[int, ...]] = {}
    count = 0
    while heap[0].bound_bytes < best.peak_bytes and effort.left > 0:
        node = heap[0]
        ops, cuts_of_ways = _best_choice(node, cuts, best.peak_bytes, effort)
        if not ops:
            break
        heapq.heappop(heap)
        chosen[node.path] = ops
        for at, cut in enumerate(cuts_of_ways):
            count += 1
            bound = max(node.bound_bytes, cut.num_bytes)
            limited, order = preceded(node.storages, *_first(ops, ops[at])), node.order
            if bound < best.peak_bytes:
                now = _searched(limited, node.order, bound, effort)
                best, order = min(best, now, key=lambda each: each.peak_bytes), now.order
            leaf = cut if cut.num_bytes >= node.bound_bytes else node.cut
            path = (*node.path, (at, ops))
            heapq.heappush(heap, _Open(bound, count, path, limited, leaf, order))
    return best, _tree((), chosen, {node.path: node for node in heap})


def _first(ops: Sequence[int], first: int) -> Pairs:
    """The pairs by which ``first`` runs before the others of ``ops``."""
    others = np.array([op for op in ops if op != first], dtype=np.int64)
    return np.full(len(others), first), others


def _searched(storages: Storages, order: LongArray, bound: int, effort: WorkLeft) -> Found:
    now = hoisted_both_ways(storages, legal(storages, order), bound, effort)
    return refined(storages, now, bound, effort)


def _tree(path: _Path, chosen: dict[_Path, tuple[int, ...]], ends: dict[_Path, _Open]) -> Choice:
    if path not in chosen:
        end = ends[path]
        return Choice(end.bound_bytes, maximum_flow(end.storages, end.cut.op))
    ops = chosen[path]
    ways = tuple(_tree((*path, (at, ops)), chosen, ends) for at in range(len(ops)))
    return Choice(min(way.bound_bytes for way in ways), None, ops, ways)


def _best_choice(
    node: _Open, cuts: Sequence[OpCut], limit: int, effort: WorkLeft
) -> tuple[tuple[int, ...], tuple[OpCut, ...]]:
    """The choice whose weakest way has the largest bound, with its ways; none where none helps."""
    best_rank = (node.bound_bytes, node.bound_bytes)
    best: tuple[tuple[int, ...], tuple[OpCut, ...]] = ((), ())
    for ops in _possible(node, cuts):
        if best_rank[0] >= limit or effort.left <= 0:
            break
        ways = tuple(_cut_of_way(node.storages, ops, first, effort) for first in ops)
        bounds = sorted(max(min(cut.num_bytes, limit), node.bound_bytes) for cut in ways)
        rank = (bounds[0], bounds[1])
        if rank > best_rank:
            best, best_rank = (ops, ways), rank
    return best


def _cut_of_way(storages: Storages, ops: tuple[int, ...], first: int, effort: WorkLeft) -> OpCut:
    """The largest cut known where ``first`` is the first of ops; of a pair both ops are asked."""
    asked = ops if len(ops) == 2 else (first,)
    for _ in asked:
        effort.cut()
    cuts = (minimum_cut(storages, op, _first(ops, first)) for op in asked)
    return max(cuts, key=lambda cut: cut.num_bytes)


def _possible(node: _Open, cuts: Sequence[OpCut]) -> Iterator[tuple[int, ...]]:
    """Sets of ops that nothing orders: with the largest cuts, of equal size, pairs at the peak."""
    storages = node.storages
    falling = node.order[np.argsort(-memory_curve(storages, node.order), kind="stable")].tolist()
    taken = np.zeros(storages.num_ops, dtype=np.int64)
    np.add.at(taken, storages.producer, storages.num_bytes)
    sizes, counts = np.unique(taken[taken > 0], return_counts=True)
    likely = [[cut.op for cut in cuts]]
    for size in sizes[counts > 1][::-1][:_NUM_SIZES].tolist():
        likely.append([op for op in falling if taken[op] == size])
    for ops in likely:
        apart = _unordered(storages, ops)
        if len(apart) > 2:
            yield apart
    yield from _at_the_peak(storages, node.order, falling[0])
    peaks = list(dict.fromkeys((node.cut.op, *falling[:_NUM_PEAKS])))
    sides = {op: sides_of(storages.forwards, op) for op in peaks}
    for first, second in combinations(peaks, 2):
        if sides[first][second] == BETWEEN:
            yield first, second


def _at_the_peak(storages: Storages, order: LongArray, peak: int) -> Iterator[tuple[int, int]]:
    """The op of the peak with each op that could have made it lower: by running before it, what
    reads a storage that is held then, or by running later, what made one. The largest first."""
    position = positions(order)
    now, side = position[peak], sides_of(storages.forwards, peak)
    of_read = np.repeat(np.arange(len(storages.producer)), np.diff(storages.reader_ptr))
    late = (position[storages.readers] > now) & (side[storages.readers] == BETWEEN)
    late &= position[storages.producer[of_read]] < now
    held = np.unique(of_read[position[storages.readers] >= now])
    early = held[(position[storages.producer[held]] < now)]
    early = early[side[storages.producer[early]] == BETWEEN]
    others = np.concatenate((storages.readers[late], storages.producer[early]))
    sizes = np.concatenate((storages.num_bytes[of_read[late]], storages.num_bytes[early]))
    for other in dict.fromkeys(others[np.argsort(-sizes, kind="stable")].tolist()[:_NUM_HELD]):
        yield peak, other


def _unordered(storages: Storages, ops: Sequence[int]) -> tuple[int, ...]:
    """Of the ops, from the first on, those that nothing orders among each other."""
    apart: dict[int, LongArray] = {}
    for op in ops:
        if all(side[op] == BETWEEN for side in apart.values()):
            apart[op] = sides_of(storages.forwards, op)
        if len(apart) == _MAX_EQUAL:
            break
    return tuple(apart)
