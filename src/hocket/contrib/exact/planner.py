"""Optimal: the shortest step that any plan of a small graph has, with the proof.

Of tiny graphs every plan is tried or ruled out (`hocket.planners.placement.exact`). Otherwise
placement and order are one constraint model over whole ticks of time, solved by OR-tools' CP-SAT
from the best of a few simple plans; the simulator then runs the schedule that was found, and the
best simulated plan is kept. The plan claims whether it is proven, and otherwise how much shorter a
step could be at most. Where transfers share channels the model counts each alone on its way: its
bound holds, but the simulated step can be longer, and the proof is then left open. Exponential;
limited to `MAX_OPS` ops and to a fixed amount of work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import LongArray
from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.extras import require
from hocket.contrib.exact.instance import Instance, longest_step_s, make_instance
from hocket.contrib.exact.search import WORK, search
from hocket.contrib.exact.warm_start import first_plans
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.bounds.bound import lower_bound
from hocket.planners.bounds.classes import BoundClasses, find_classes
from hocket.planners.bounds.heads import Heads, find_heads
from hocket.planners.bounds.units import find_units
from hocket.planners.placement.exact.exhaustive import MAX_RUNS, is_tiny, try_all
from hocket.planners.placement.local_search import local_search
from hocket.planners.tables import task_table
from hocket.simulate.engine import simulate
from hocket.simulate.timeline import Timeline

MAX_OPS = 64
PROVEN_GAP = 1e-6
"""Rounding to ticks costs a bound up to this share; a gap below it counts as none."""
_MAX_SEARCHES = 4
"""Searches with ever less memory, until what is found fits."""


@dataclass(frozen=True, eq=False)
class _Best:
    """The best plan so far that fits."""

    plan: Plan
    timeline: Timeline


def optimal(problem: Problem, plan: Plan) -> Plan:
    """The plan with the shortest step, or the best that a fixed amount of work finds."""
    _require_handled(problem)
    require("ortools", "the exact planner")
    units = find_units(problem.graph)
    classes = find_classes(problem, units)
    heads = find_heads(problem.graph, units, classes)
    tasks = task_table(problem)
    longest_s = longest_step_s(tasks, units, problem)
    level_s = (classes.op_s + heads.tail_s).min(axis=0)
    rough = make_instance(problem, tasks, units, longest_s)
    best, _ = _better(problem, None, first_plans(rough, plan, level_s))
    step_s = best.timeline.makespan_s if best is not None else longest_s
    instance = make_instance(problem, tasks, units, step_s)
    bound_s = lower_bound(replace(problem, objective="latency")).seconds
    best = _improved(problem, best, bound_s)
    if is_tiny(problem) and not _is_proven(best, bound_s):
        best, tried_s = _try_all(problem, plan, best)
        bound_s = max(bound_s, tried_s)
    if not _is_proven(best, bound_s):
        best, found_s = _search(instance, classes, heads, plan, best)
        bound_s = max(bound_s, found_s)
        best = _improved(problem, best, bound_s)
    if best is None:
        raise NoFeasiblePlanError(
            "no plan fits the memory of the devices"
            if bound_s == np.inf
            else "the exact planner found no plan that fits the memory of the devices",
            hint="take devices with more memory, or more of them",
        )
    gap = _gap(best, bound_s)
    return best.plan.claiming(
        proven=gap <= PROVEN_GAP,
        step_bound_s=min(bound_s, best.timeline.makespan_s),
        gap=gap,
    )


def _try_all(problem: Problem, plan: Plan, best: _Best | None) -> tuple[_Best | None, float]:
    """The best plan of all of a tiny graph, and what trying them proves."""
    known_s = best.timeline.makespan_s if best is not None else np.inf
    answer = try_all(problem, plan, MAX_RUNS, known_s)
    if answer.plan is not None:
        best, _ = _better(problem, best, [answer.plan])
    return best, answer.bound_s


def _is_proven(best: _Best | None, bound_s: float) -> bool:
    return bound_s == np.inf if best is None else _gap(best, bound_s) <= PROVEN_GAP


def _require_handled(problem: Problem) -> None:
    num_ops = problem.graph.num_ops
    if problem.objective != "latency" or problem.contiguous:
        raise UsageError(
            "the exact planner makes the time of one step small, on devices in any pattern",
            hint="for the load of the busiest device or contiguous devices try 'throughput'",
        )
    if num_ops > MAX_OPS:
        raise UsageError(
            f"the exact planner takes up to {MAX_OPS} ops, the graph has {num_ops}",
            hint="try the planner 'auto', which says how far from the optimum it can be at most",
        )


def _search(
    instance: Instance,
    classes: BoundClasses,
    heads: Heads,
    plan: Plan,
    best: _Best | None,
) -> tuple[_Best | None, float]:
    """The best plan after searching, and what the first search, with all memory, proves."""
    problem = instance.problem
    memory_bytes = problem.memory_bytes
    bound_s = 0.0
    for turn in range(_MAX_SEARCHES):
        known = best.timeline if best is not None else None
        work = WORK if turn == 0 else WORK / _MAX_SEARCHES
        found = search(instance, classes, heads, memory_bytes, known, work)
        bound_s = found.bound_s if turn == 0 else bound_s
        plans = found.plans(plan, problem.cluster.num_devices)
        best, lacking = _better(problem, best, plans)
        if not plans or not lacking.any():
            break
        memory_bytes = memory_bytes - lacking
    return best, bound_s


def _improved(problem: Problem, best: _Best | None, bound_s: float) -> _Best | None:
    """Where the simulator sees more than the model does, a search on its own terms goes on."""
    if best is None or _is_proven(best, bound_s):
        return best
    better, _ = _better(problem, best, [local_search(problem, best.plan)])
    return better


def _better(
    problem: Problem, best: _Best | None, plans: Iterable[Plan]
) -> tuple[_Best | None, LongArray]:
    """The best of the plans that fit; and, where none of these does, the bytes that each lacks."""
    usable = problem.memory_bytes
    lacking = np.zeros_like(usable)
    for number, plan in enumerate(plans):
        timeline = simulate(problem, plan)
        lacks = np.maximum(timeline.peak_bytes - usable, 0)
        lacking = lacks if number == 0 else np.minimum(lacking, lacks)
        if lacks.any():
            continue
        if best is None or timeline.makespan_s < best.timeline.makespan_s:
            best = _Best(plan, timeline)
    return best, lacking


def _gap(best: _Best, bound_s: float) -> float:
    """The share of the step by which another plan could be shorter."""
    step_s = best.timeline.makespan_s
    return max(1 - bound_s / step_s, 0.0) if step_s > 0 else 0.0
