"""Stages of a pipeline: which ops they have, and in which order they take passes."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.coarsen import bound_ops
from hocket.graph.graph import Graph, Phase


@lru_cache(maxsize=64)
def places_of(graph: Graph) -> IntArray:
    """Per op, the forward op whose place in the forward pass decides about its stage.

    A forward op decides for itself, or the first of those that no legal plan separates; a backward
    op goes with its forward op, or, where it has none, with what it reads; an update goes with its
    parameter.
    """
    unit = bound_ops(graph)
    number = np.arange(graph.num_ops)
    is_forward = graph.op_phase == Phase.FORWARD
    first = np.full(graph.num_ops, graph.num_ops)
    np.minimum.at(first, unit[is_forward], number[is_forward])
    place = np.where(first[unit] < graph.num_ops, first[unit], -1)
    partner = graph.partner
    has_partner = (place < 0) & (partner >= 0)
    place[has_partner] = place[partner[has_partner]]
    for op in np.flatnonzero(place < 0).tolist():
        makers = graph.tensor_producer[graph.reads_of(op)]
        place[op] = int(place[makers[makers >= 0]].max(initial=0))
    return place.astype(np.int32)


def stages_of(graph: Graph, cuts: tuple[int, ...]) -> IntArray:
    """The stage of each op."""
    if not cuts:
        return np.zeros(graph.num_ops, dtype=np.int32)
    return np.searchsorted(np.array(cuts), places_of(graph), side="right").astype(np.int32)


def slots(num_stages: int, num_microbatches: int, schedule: str) -> LongArray:
    """[stage, forward 0 or backward 1, microbatch]: the position of each pass on its device.

    1F1B (Narayanan et al., PipeDream-flush) takes as many forward passes as stages follow, then one
    backward and one forward pass in turn; GPipe takes all forward passes first. One stage alone
    differentiates each microbatch at once.
    """
    found = np.zeros((num_stages, 2, num_microbatches), dtype=np.int64)
    for stage in range(num_stages):
        warm = num_stages - stage
        if schedule == "gpipe" and num_stages > 1:
            warm = num_microbatches
        warm = min(warm, num_microbatches)
        passes = [(0, i) for i in range(warm)]
        for i in range(num_microbatches):
            passes.append((1, i))
            if warm + i < num_microbatches:
                passes.append((0, warm + i))
        for position, (kind, microbatch) in enumerate(passes):
            found[stage, kind, microbatch] = position
    return found
