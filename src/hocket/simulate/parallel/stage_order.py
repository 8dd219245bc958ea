"""Stages of a pipeline: which ops they have, and in which order they run passes.

`places_of` maps every op to a position in the forward pass, `stages_of` to a stage. `slots` gives
the order of passes under GPipe, 1F1B and zero-bubble schedules.
"""

from __future__ import annotations

from enum import IntEnum
from functools import lru_cache

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.graph.coarsen import bound_ops
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections.schedule import round_order
from hocket.transformer.parallel_config import SPLIT, ScheduleName


@lru_cache(maxsize=64)
def places_of(graph: Graph) -> IntArray:
    """Return, per op, the forward op whose position decides its stage.

    Forward ops that no legal plan separates follow the first of them. A backward op follows its
    forward op or, without one, the latest producer of its inputs. An update follows its
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
    """Return the stage of each op."""
    if not cuts:
        return np.zeros(graph.num_ops, dtype=np.int32)
    return np.searchsorted(np.array(cuts), places_of(graph), side="right").astype(np.int32)


def slots(num_stages: int, num_microbatches: int, schedule: ScheduleName) -> LongArray:
    """Return [stage, `PassKind`, microbatch]: the position of each pass in its device's order.

    1F1B (Narayanan et al., PipeDream-flush) starts with as many forward passes as stages follow,
    then alternates between a backward and a forward pass. GPipe runs all forward passes first.
    ZB-H1 and ZB-H2 (Qi et al. 2024) delay weight gradients by as many passes as stages come before,
    or twice as many. A single stage runs the backward pass of each microbatch right after its
    forward pass.
    """
    stage = np.arange(num_stages)
    ahead = stage[::-1]
    if schedule == "gpipe" and num_stages > 1:
        # GPipe runs all forward passes before the first backward pass.
        ahead = np.full_like(stage, num_microbatches)
    times = 2 if schedule == "zb-h2" else 1
    warm_up = np.minimum(times * ahead, num_microbatches)
    order = round_order(num_microbatches, warm_up, times * stage if schedule in SPLIT else None)
    return order.argsort(axis=1, kind="stable").reshape(num_stages, -1, num_microbatches)


class PassKind(IntEnum):
    """Type of pass to which an op of a microbatch belongs."""

    FORWARD = 0
    BACKWARD = 1
    WEIGHT_GRADIENT = 2
    """Backward ops that no other stage waits for, in schedules that delay them."""


@lru_cache(maxsize=64)
def pass_kinds(graph: Graph, cuts: tuple[int, ...], schedule: ScheduleName) -> IntArray:
    """Return the type of pass of each op; updates count as backward."""
    kinds = graph.op_phase.clip(max=int(PassKind.BACKWARD)).astype(np.int32)
    if schedule not in SPLIT:
        return kinds
    stage = stages_of(graph, cuts)
    is_backward = graph.op_phase == Phase.BACKWARD
    is_urgent = np.zeros(graph.num_ops, dtype=np.bool_)
    # Backward through the graph: an op is urgent if another stage or an urgent op needs its result.
    for op in np.flatnonzero(is_backward)[::-1].tolist():
        makers = graph.tensor_producer[graph.reads_of(op)]
        makers = makers[makers >= 0]
        waits = is_backward[makers] & (is_urgent[op] | (stage[makers] != stage[op]))
        is_urgent[makers[waits]] = True
    kinds[is_backward & ~is_urgent] = PassKind.WEIGHT_GRADIENT
    return kinds
