"""Prioritized gradient exchange as a candidate, with the step time of a steady state.

A simulated step begins and ends by itself. If gradients are exchanged in the order in which the
next forward pass needs them (P3, Jayarajan et al. 2019), a part of the exchange overlaps with that
pass. The saving per step is the difference between wait-free and prioritized steps in the gradient
simulator (`hocket.simulate.gradients`). The candidate can win on CPUs, where the runtime supports
it; for GPUs it is only reported. O(one simulation of gradients).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hocket.base.units import format_seconds
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Priority
from hocket.plan.sections.priority import takes_priority
from hocket.planners.candidates import Candidate
from hocket.planners.communication.priority import choose_for_replicas, with_priority

BY_PRIORITY = "DDP, gradient priority"
_WITHIN_REACH = 1.5
"""Candidates slower than the best by more than this factor cannot win by gradient priority."""


def by_priority(problem: Problem, options: Iterable[Candidate]) -> list[Candidate]:
    """The fastest eligible candidate with prioritized gradients; empty if that saves nothing."""
    fitting = sorted(
        (candidate for candidate in options if candidate.step_s is not None),
        key=lambda candidate: candidate.step_s or 0.0,
    )
    quickest = next((candidate for candidate in fitting if _can(candidate)), None)
    # The saving is limited, so planning the exchange for slow candidates is a waste.
    if quickest is None or (quickest.step_s or 0.0) > _WITHIN_REACH * (fitting[0].step_s or 0.0):
        return []
    found = _prioritized(problem, quickest)
    return [] if found is None else [found]


def _can(candidate: Candidate) -> bool:
    parallel = None if candidate.plan is None else candidate.plan.get(Parallel)
    return parallel is not None and takes_priority(parallel)


def _prioritized(problem: Problem, candidate: Candidate) -> Candidate | None:
    assert candidate.plan is not None
    assert candidate.step_s is not None
    plan = with_priority(problem, candidate.plan)
    if plan.get(Priority) is None:
        return None
    saved_s = _saved_s(problem, plan, candidate.step_s)
    step_s = candidate.step_s - saved_s
    if not _is_supported(problem, plan[Parallel]):
        message = f"a step among many would take {format_seconds(step_s)} instead of "
        message += f"{format_seconds(candidate.step_s)}; it is supported on CPUs only"
        return replace(
            candidate, planner=BY_PRIORITY, plan=None, timeline=None, feasible=False, reason=message
        )
    return replace(
        candidate, planner=BY_PRIORITY, plan=plan.claiming(step_s=step_s), saved_s=saved_s
    )


def _is_supported(problem: Problem, parallel: Parallel) -> bool:
    used = set(parallel.devices)
    return all(device.kind.is_cpu for device in problem.cluster.devices if device.name in used)


def _saved_s(problem: Problem, plan: Plan, alone_s: float) -> float:
    """Seconds that a step in steady state saves compared with a single step.

    If the two simulators disagree on the step time, the saving is scaled to the shorter one.
    """
    choice = choose_for_replicas(problem, plan)
    assert choice is not None, "the plan has an order of gradients"
    wait_free_s = choice.offer("wait-free").step_s
    return (wait_free_s - choice.chosen.step_s) * min(1.0, alone_s / wait_free_s)
