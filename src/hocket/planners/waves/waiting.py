"""How often two lanes wait for each other, given what each op needs of the other one.

A lane passes its waits in order, so of several only the latest counts, and only where it is later
than all before. A wait costs time of its own in a graph of short kernels. So an op that has to wait
waits for all that is over by then as planned: later ops of its lane then find most of what they
need, and lanes that are some ops apart wait once for so many, instead of at each. O(ops).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.sections import Lanes, LaneWait
from hocket.plan.sections.lanes import NUM_LANES
from hocket.simulate.parallel.lanes import lane_waits
from hocket.simulate.timeline import Timeline


class Edge(NamedTuple):
    """A call that waits for one of the other lane, by their places in the order of all."""

    awaited: int
    waiting: int


def joined_waits(lane: ArrayLike, need: LongArray, works: Sequence[bool]) -> list[Edge]:
    """Waits with which every call comes after the call of the other lane that it needs.

    ``lane`` is that of each call, in the planned order; ``need`` is -1 for none. Calls that put
    nothing on the device are over with the call before, and nobody waits there.
    """
    lanes, does = np.asarray(lane), np.asarray(works, dtype=np.bool_)
    found = []
    for one in np.unique(lanes).tolist():
        own, others = np.flatnonzero(lanes == one), np.flatnonzero((lanes != one) & does)
        number = np.searchsorted(others, np.maximum.accumulate(need[own]), "right") - 1
        # Of the other lane the last call before this one has begun, so those before that are over.
        over = np.searchsorted(others, own) - 2
        passed = -1
        for call, least, most in zip(
            own[does[own]], number[does[own]], over[does[own]], strict=True
        ):
            if least > passed:
                passed = max(least, most)
                found.append(Edge(int(others[passed]), int(call)))
    return sorted(found)


def by_start(passes: IntArray, timeline: Timeline) -> list[tuple[int, int]]:
    """The ops of all waves, (wave, op), in the order in which they start."""
    wave, op = np.nonzero(passes >= 0)
    number = passes[wave, op]
    order = np.lexsort((number, timeline.op_start_s[number]))
    return [*zip(wave[order].tolist(), op[order].tolist(), strict=True)]


def num_waits(
    graph: Graph, passes: IntArray, timeline: Timeline, more: Iterable[LaneWait] = ()
) -> int:
    """Waits of a replayed step: for statistics, drawn numbers, gradients to add, and ``more``."""
    order = by_start(passes, timeline)
    at = {op: number for number, op in enumerate(order)}
    need = np.full(len(order), -1, dtype=np.int64)
    results = lane_waits(graph, Lanes(lead=0), len(passes))
    for wait in (*results, *_added(graph, len(passes)), *more):
        waiting, awaited = at.get((wait.wave, wait.op)), at.get((wait.on_wave, wait.on_op))
        if waiting is not None and awaited is not None and awaited < waiting:
            need[waiting] = max(need[waiting], awaited)
    works = [not graph.only_looks[op] for _, op in order]
    return len(joined_waits([wave % NUM_LANES for wave, _ in order], need, works))


def _added(graph: Graph, num_waves: int) -> Iterable[LaneWait]:
    """A gradient is added to the sum when that of the wave before is in it."""
    is_made = (graph.tensor_role == Role.GRADIENT) & (graph.tensor_producer >= 0)
    makers = np.unique(graph.tensor_producer[is_made])
    makers = makers[graph.op_phase[makers] != Phase.OPTIMIZER]
    return (
        LaneWait(wave, op, wave - 1, op) for wave in range(1, num_waves) for op in makers.tolist()
    )
