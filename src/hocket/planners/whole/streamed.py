"""Where no way of sharing fits: one device that fetches its parameters from the host as it goes.

The memory planner's plans for the whole batch on the roomiest device (`hocket.planners.memory`):
parameters at home on the host, streamed block by block, activations offloaded or recomputed, the
loss in chunks. It takes longer than all the rest and is asked only where nothing else is left.
"""

from __future__ import annotations

import time

import numpy as np

from hocket.base.errors import UsageError
from hocket.plan.problem import Problem
from hocket.planners.candidates import Candidate, empty_plan
from hocket.planners.memory.budget import BudgetFit
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.placement.devices import workers

STREAMED = "one device, streamed"
_LEVELS = 8
"""Budgets between the plain step and the leanest for which a plan is made."""
_MOST_OPS = 20_000


def streamed(problem: Problem) -> Candidate | None:
    """The best plan of the whole batch on the roomiest device; None where even that needs more."""
    if problem.graph.num_ops > _MOST_OPS:
        return None
    started = time.perf_counter()
    devices = workers(problem)
    device = int(devices[np.argmax(problem.memory_bytes[devices])])
    place = np.full(problem.graph.num_ops, device, dtype=np.int32)
    try:
        frontier = find_frontier(
            problem, empty_plan(problem, "memory").placing(place), num_levels=_LEVELS
        )
    except UsageError:
        return None  # no training step
    fit = BudgetFit(frontier, int(problem.memory_bytes[device]))
    if fit.chosen is None:
        return None
    return Candidate(
        planner=STREAMED, plan=fit.plan(), timeline=fit.chosen.timeline, feasible=True, reason="",
        plan_seconds=time.perf_counter() - started,
    )  # fmt: skip
