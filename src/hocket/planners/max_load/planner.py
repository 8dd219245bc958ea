"""Throughput: the placement with the smallest load of the busiest device.

In a pipeline, steps can follow each other as fast as the busiest device allows; its load is the
time of its ops and of the tensors that cross its boundary (`hocket.simulate.load`). With
``problem.contiguous`` no forward path leaves a device and comes back, and the optimum is proven
where the graph has few enough ideals (`contiguous`). Otherwise the contiguous split is the start
of a search over all placements (`scattered`). Bytes that stay on a device count against its memory;
where the simulator finds more at the peak, limits are lowered by that and the search runs again.

Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020;
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.max_load.bound import max_load_bound
from hocket.planners.max_load.classes import DeviceClasses, device_classes
from hocket.planners.max_load.contiguous import (
    between_necks,
    by_order,
    contiguous,
    limits_by_device,
)
from hocket.planners.max_load.numbering import renumbered
from hocket.planners.max_load.packing import packed
from hocket.planners.max_load.pieces import Pieces, is_uniform, pieces_of
from hocket.planners.max_load.scattered import scattered
from hocket.simulate.engine import simulate
from hocket.simulate.load import link_times, max_load_s

_MAX_ROUNDS = 5
"""How often limits on memory are lowered after a simulation."""
_EXACT = 1e-5
"""A load this close to its bound, relatively, is proven."""


@dataclass(frozen=True, eq=False)
class _Case:
    """A problem in pieces, with the bytes that each device may hold."""

    problem: Problem
    pieces: Pieces
    is_alike: bool
    """Whether all links are alike, so that loads depend on sets of pieces alone."""
    limit_bytes: LongArray

    @cached_property
    def classes(self) -> DeviceClasses:
        return device_classes(self.problem, self.limit_bytes)

    @property
    def bound_s(self) -> float:
        """What no placement is better than, whatever room is left to this one."""
        return max_load_bound(self.problem)

    @property
    def memory_is_exact(self) -> bool:
        """Whether the sums of bytes that stay are all that memory can forbid."""
        holds_all = int(self.pieces.memory_bytes.sum()) <= int(self.limit_bytes.min())
        return holds_all or self.problem.cluster.uses_stated_times


@dataclass(frozen=True, eq=False)
class _Answer:
    device_of: IntArray
    """Per piece."""
    is_proven: bool = False


def throughput(problem: Problem, plan: Plan) -> Plan:
    """Place every op so that the busiest device has as little to do as possible."""
    return _planned(problem, plan, _contiguous if problem.contiguous else _scattered)


def dpl(problem: Problem, plan: Plan) -> Plan:
    """Cut a topological order into stages, as well as that order allows."""
    return _planned(problem, plan, _by_order)


def pipedream(problem: Problem, plan: Plan) -> Plan:
    """Cut the model into stages where a single piece connects what is before to what is after.

    PipeDream's partition of a chain of layers, without replicas: branches stay on one device.
    """
    return _planned(problem, plan, _between_necks)


def _planned(problem: Problem, plan: Plan, search: Callable[[_Case], _Answer | None]) -> Plan:
    pieces = pieces_of(problem)
    _require_runnable(problem, pieces)
    case = _Case(problem, pieces, is_uniform(link_times(problem)), problem.memory_bytes)
    for _ in range(_MAX_ROUNDS):
        answer = search(case)
        if answer is None:
            break
        placed = _with_answer(case, plan, answer)
        over = simulate(problem, placed).peak_bytes - problem.memory_bytes
        if not np.any(over > 0):
            return placed
        limits = case.limit_bytes - np.maximum(over, 0)
        case = replace(case, limit_bytes=np.maximum(limits, 0))
    raise NoFeasiblePlanError(
        "no split was found in which every device can hold its part",
        hint="use more or larger devices, or another planner",
    )


def _with_answer(case: _Case, plan: Plan, answer: _Answer) -> Plan:
    device_of = answer.device_of[case.pieces.piece_of].astype(np.int32)
    load_s = max_load_s(case.problem, device_of)
    bound = min(case.bound_s, load_s)
    return plan.having(Placement(device_of)).claiming(
        max_load_s=load_s,
        load_bound_s=load_s if answer.is_proven else bound,
        proven=answer.is_proven or load_s <= bound * (1 + _EXACT),
    )


def _contiguous(case: _Case) -> _Answer | None:
    found = contiguous(case.problem, case.pieces, case.classes, is_alike=case.is_alike)
    if found is None:
        return None
    answer = _Answer(
        _renumbered(case, found.device_of), is_proven=found.is_proven and case.memory_is_exact
    )
    if case.is_alike:
        return answer
    # Where links differ, the search works with their means, and the best of it need not be best.
    first = _by_order(case)
    answers = [answer] if first is None else [answer, first]
    return min(
        answers,
        key=lambda tried: max_load_s(case.problem, tried.device_of[case.pieces.piece_of]),
    )


def _by_order(case: _Case) -> _Answer | None:
    found = by_order(case.pieces, case.classes, is_alike=case.is_alike)
    return None if found is None else _Answer(_renumbered(case, found.device_of))


def _between_necks(case: _Case) -> _Answer | None:
    found = between_necks(case.pieces, case.classes, is_alike=case.is_alike)
    return None if found is None else _Answer(_renumbered(case, found.device_of))


def _scattered(case: _Case) -> _Answer | None:
    limit_bytes = limits_by_device(case.problem, case.classes)
    found = _contiguous(case)
    start = packed(case.pieces, limit_bytes) if found is None else found.device_of
    if start is None:
        return None
    best = scattered(
        case.problem, case.pieces, case.classes, start,
        limit_bytes=limit_bytes, is_alike=case.is_alike, good_s=case.bound_s * (1 + _EXACT),
    )  # fmt: skip
    return _Answer(best.device_of)


def _renumbered(case: _Case, device_of: IntArray) -> IntArray:
    """Which of equal devices has which part matters only where links differ."""
    if case.is_alike:
        return device_of
    return renumbered(case.problem, case.pieces, case.classes, device_of)


def _require_runnable(problem: Problem, pieces: Pieces) -> None:
    stuck = np.flatnonzero(~np.isfinite(pieces.seconds).any(axis=0))
    if len(stuck):
        name = problem.graph.op_names[int(np.flatnonzero(pieces.piece_of == stuck[0])[0])]
        raise NoFeasiblePlanError(
            f"no device can run op {name!r} with the ops that must sit with it",
            hint="add a device of a kind that can run it",
        )
