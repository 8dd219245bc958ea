"""Random series-parallel graphs: spans of ops composed in series or in parallel.

A span of n ops is divided into two spans in series, or into a fork, two to four parallel spans and
a join, until three or fewer ops are left. O(ops log ops) expected.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hocket.graph.generators.batch import BatchBuilder
from hocket.graph.generators.plain import add_plain_ops, chance
from hocket.graph.graph import Graph

_SPAN, _BRANCH_START, _BRANCH_END, _JOIN = range(4)


def series_parallel(num_ops: int, seed: int) -> Graph:
    """A series-parallel graph of exactly ``num_ops`` forward ops with one source and one sink."""
    source = chance(seed)
    builder = BatchBuilder(f"series-parallel-{num_ops}")
    ops, outputs = add_plain_ops(builder, num_ops, source)
    readers, producers = _edges(num_ops, source)
    builder.reads(ops[readers], outputs[producers])
    return builder.build({"family": "series-parallel", "num_ops": num_ops, "seed": seed})


def _edges(num_ops: int, source: np.random.RandomState) -> tuple[list[int], list[int]]:
    """(reader, producer) of every edge, with ops numbered in the order in which they are made."""
    readers: list[int] = []
    producers: list[int] = []
    last = -1
    num_made = 0
    branch_ends: list[list[int]] = []
    branch_starts: list[int] = []
    todo = [(_SPAN, num_ops)]
    draw = _ManyDraws(source)

    def make(inputs: list[int]) -> int:
        readers.extend([num_made] * len(inputs))
        producers.extend(inputs)
        return num_made

    while todo:
        action, count = todo.pop()
        if action == _SPAN and count > 3 and draw.below(2):
            todo += _parallel(count, draw)
            last = make([last] if last >= 0 else [])
            num_made += 1
            branch_starts.append(last)
            branch_ends.append([])
        elif action == _SPAN and count > 3:
            first = 1 + draw.below(count - 1)
            todo += [(_SPAN, count - first), (_SPAN, first)]
        elif action == _SPAN:
            for _ in range(count):
                last = make([last] if last >= 0 else [])
                num_made += 1
        elif action == _BRANCH_START:
            last = branch_starts[-1]
        elif action == _BRANCH_END:
            branch_ends[-1].append(last)
        else:
            branch_starts.pop()
            last = make(branch_ends.pop())
            num_made += 1
    return readers, producers


def _parallel(count: int, draw: _ManyDraws) -> list[tuple[int, int]]:
    """Return the actions that remain after the fork, last one first."""
    inner = count - 2
    num_branches = min(2 + draw.below(3), inner)
    cuts = sorted(draw.below(inner - num_branches + 1) for _ in range(num_branches - 1))
    bounds = [0, *cuts, inner - num_branches]
    todo = [(_JOIN, 0)]
    for start, stop in pairwise(bounds):
        todo += [(_BRANCH_END, 0), (_SPAN, stop - start + 1), (_BRANCH_START, 0)]
    return todo


class _ManyDraws:
    """Random integers one at a time, drawn from the generator in thousands."""

    def __init__(self, source: np.random.RandomState) -> None:
        self._source = source
        self._waiting: list[int] = []

    def below(self, limit: int) -> int:
        """Return an integer from 0 to ``limit`` - 1."""
        if not self._waiting:
            self._waiting = self._source.randint(0, 2**31 - 1, 4096).tolist()
        return self._waiting.pop() % limit
