"""Branch on which of two ops runs first, with minimum cuts as bounds.

Of two ops that nothing orders, every order runs one first; either choice is one more precedence,
under which more ops lie before and after each peak, so its cut can only grow. The least bound over
the open choices is a bound for every order, stronger than any single cut, and each choice is also
searched for a better order (disjunctive branching, as Carlier and Pinson, 1989, do for job shops).
The pair is the one whose weaker choice raises the bound most. O(choices · pairs · cuts).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.planners.memory.cut import BETWEEN, Cut, minimum_cut, sides_of
from hocket.planners.memory.refine import Effort, Found, hoisted_both_ways, refined
from hocket.planners.memory.storages import Storages, preceded


class Choice(NamedTuple):
    """Either a cut that holds under all precedences so far, or both ways to order a pair."""

    bound_bytes: int
    cut: Cut | None = None
    pair: tuple[int, int] = (-1, -1)
    first: Choice | None = None
    """The pair's first op runs before its second."""
    second: Choice | None = None
    """The other way round."""


_Path = tuple[tuple[int, int], ...]


class _Open(NamedTuple):
    bound_bytes: int
    number: int
    path: _Path
    storages: Storages
    cut: Cut


def branched(
    storages: Storages, found: Found, cut: Cut, ops: Sequence[int], effort: Effort
) -> tuple[Found, Choice]:
    """A better order as far as one is found, and the tree of choices that bounds every order.

    ``cut`` is the largest known, and of ``ops`` pairs are made.
    """
    best = found
    heap = [_Open(cut.num_bytes, 0, (), storages, cut)]
    pairs: dict[_Path, tuple[int, int]] = {}
    count = 0
    while heap[0].bound_bytes < best.peak_bytes and effort.left > 0:
        node = heap[0]
        pair, leaves = _best_pair(node, ops, best.peak_bytes, effort)
        if pair is None:
            break
        heapq.heappop(heap)
        pairs[node.path] = pair
        for way, leaf in zip((pair, pair[::-1]), leaves, strict=True):
            count += 1
            limited = preceded(node.storages, *(np.array([op]) for op in way))
            bound = max(node.bound_bytes, leaf.num_bytes)
            chosen = leaf if leaf.num_bytes >= node.bound_bytes else node.cut
            child = _Open(bound, count, (*node.path, way), limited, chosen)
            heapq.heappush(heap, child)
            if bound < best.peak_bytes:
                base = legal(limited, best.order)
                now = hoisted_both_ways(limited, base, bound, effort)
                now = refined(limited, now, bound, effort)
                if now.peak_bytes < best.peak_bytes:
                    best = now
    ends = {node.path: Choice(node.bound_bytes, node.cut) for node in heap}
    return best, _tree((), pairs, ends)


def _tree(path: _Path, pairs: dict[_Path, tuple[int, int]], leaves: dict[_Path, Choice]) -> Choice:
    if path not in pairs:
        return leaves[path]
    pair = pairs[path]
    first = _tree((*path, pair), pairs, leaves)
    second = _tree((*path, pair[::-1]), pairs, leaves)
    return Choice(min(first.bound_bytes, second.bound_bytes), None, pair, first, second)


def _best_pair(
    node: _Open, ops: Sequence[int], limit: int, effort: Effort
) -> tuple[tuple[int, int] | None, tuple[Cut, Cut]]:
    """The pair that raises the bound most, and the cuts of both its ways; None for no such pair."""
    best, best_rank, cuts = None, (node.bound_bytes, node.bound_bytes), (node.cut, node.cut)
    sides = {op: sides_of(node.storages.forwards, op) for op in ops}
    for first, second in combinations(ops, 2):
        if sides[first][second] != BETWEEN or not effort.spend():
            continue
        found = []
        for way in ((first, second), (second, first)):
            limited = preceded(node.storages, *(np.array([op]) for op in way))
            found.append(max((minimum_cut(limited, op) for op in way), key=lambda c: c.num_bytes))
        values = sorted(min(cut.num_bytes, limit) for cut in found)
        rank = (max(values[0], node.bound_bytes), max(values[1], node.bound_bytes))
        if rank > best_rank:
            best, best_rank, cuts = (first, second), rank, (found[0], found[1])
    return best, cuts


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
