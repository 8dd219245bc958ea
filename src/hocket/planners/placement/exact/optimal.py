"""Optimal: the shortest step that any plan of a small graph has, with the proof.

Every plan is tried or ruled out (`exhaustive`), from the best of a few simple plans after a local
search. The plan claims whether it is proven, and otherwise how much shorter a step could be at
most. Exponential; limited to `MAX_OPS` ops and to a fixed number of simulations.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.bounds.bound import lower_bound
from hocket.planners.placement.exact.exhaustive import MAX_OPS, MAX_RUNS, can_be_tried, try_all
from hocket.planners.placement.local_search import local_search
from hocket.planners.placement.m_etf import m_etf
from hocket.planners.placement.one_device import one_device
from hocket.simulate.engine import simulate

PROVEN_GAP = 1e-6
"""A gap below it counts as none."""


def optimal(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with the shortest step, or the best that a fixed amount of work finds."""
    _require_handled(problem)
    best, best_s = _known(problem, plan)
    bound_s = lower_bound(replace(problem, objective="latency")).seconds
    if bound_s < best_s * (1 - PROVEN_GAP):
        answer = try_all(problem, plan, MAX_RUNS, best_s)
        bound_s = max(bound_s, answer.bound_s)
        if answer.plan is not None:
            best, best_s = answer.plan, simulate(problem, answer.plan).makespan_s
    if best is None:
        raise NoFeasiblePlanError(
            "no plan fits the memory of the devices"
            if bound_s == np.inf
            else "the exact planner found no plan that fits the memory of the devices",
            hint="take devices with more memory, or more of them",
        )
    gap = max(1 - bound_s / best_s, 0.0) if best_s > 0 else 0.0
    return best.claiming(proven=gap <= PROVEN_GAP, step_bound_s=min(bound_s, best_s), gap=gap)


def _require_handled(problem: Problem) -> None:
    if problem.objective != "latency" or problem.contiguous:
        raise UsageError(
            "the exact planner makes the time of one step small, on devices in any pattern",
            hint="for the load of the busiest device or contiguous devices try 'throughput'",
        )
    if problem.graph.num_ops and not can_be_tried(problem):
        raise UsageError(
            f"the exact planner takes up to {MAX_OPS} ops on one stream, the graph has "
            f"{problem.graph.num_ops}",
            hint="try the planner 'auto', which says how far from the optimum it can be at most",
        )


def _known(problem: Problem, plan: Plan) -> tuple[Plan | None, float]:
    """The best simple plan that fits, searched from; none and infinity where none fits."""
    best, best_s = None, np.inf
    for placer in (one_device, m_etf):
        try:
            start = placer(problem, plan)
        except NoFeasiblePlanError:
            continue
        found = local_search(problem, start)
        timeline = simulate(problem, found)
        if np.all(timeline.peak_bytes <= problem.memory_bytes) and timeline.makespan_s < best_s:
            best, best_s = found, timeline.makespan_s
    return best, best_s
