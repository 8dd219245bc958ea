"""Memory: what fits into a number of bytes on one device, and how."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hocket.base.atomic import write_together
from hocket.base.errors import UsageError
from hocket.base.units import format_seconds
from hocket.cost.calibrate import Calibration
from hocket.cost.profile import Profile
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.files import plan_bytes
from hocket.plan.make import ON_THIS_MACHINE, find_cluster, make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Memory
from hocket.planners.candidates import empty_plan
from hocket.planners.memory.budget import BudgetFit, keep_budget
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.frontier import Frontier, minimum_memory_bytes
from hocket.planners.memory.given_budget import (
    BudgetWarning,
    budget_of,
    require_memory,
    require_one_device,
    unusable_note,
)
from hocket.planners.memory.largest import largest

__all__ = [
    "BudgetFit",
    "BudgetWarning",
    "Fitted",
    "Frontier",
    "Largest",
    "budget_of",
    "fit",
    "fit_problem",
    "largest_that_fits",
    "require_memory",
    "require_one_device",
    "save_fit",
    "unusable_note",
]

PLANNER = "memory"
Tell = Callable[[int, int, bool], None]
"""Callback for each try: the size, the bytes that it needs, whether it fits."""


def fit(
    graph: Graph,
    on: str | Path | Cluster,
    memory: int | str | None = None,
    *,
    host_bytes: float = float("inf"),
    async_update: bool = False,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
) -> BudgetFit:
    """Fit a training step into ``memory``, such as ``"8GiB"``, on a cluster of one device.

    Without ``memory`` it is what the device has beside its headroom. ``host_bytes`` limit what may
    wait on the host; ``async_update`` is that of `hocket.prepare`. The fit's ``chosen`` plan is
    None where nothing fits; its ``plan()`` raises `NoFeasiblePlanError` then.
    """
    problem = make_problem(graph, on, profile=profile, calibration=calibration)
    budget_bytes = None if memory is None else budget_of(memory)
    fitted = fit_problem(problem, budget_bytes, host_bytes=host_bytes, async_update=async_update)
    if note := unusable_note(problem, fitted.budget_bytes):
        warnings.warn(note, BudgetWarning, 2)
    return fitted


def fit_problem(
    problem: Problem,
    memory_bytes: int | None = None,
    *,
    host_bytes: float = float("inf"),
    async_update: bool = False,
) -> BudgetFit:
    """Like `fit` for an existing problem, but without its warning."""
    budget_bytes = _budget_on_one(problem, memory_bytes)
    return keep_budget(
        problem, _on_one(problem), budget_bytes, host_bytes=host_bytes, async_update=async_update
    )


def _budget_on_one(problem: Problem, memory_bytes: int | None) -> int:
    """The budget on the one device of a problem: by default what tensors may fill."""
    require_one_device(problem.cluster)
    if memory_bytes is None:
        return max(int(problem.memory_bytes[0]), 0)
    require_memory(problem.cluster.devices[0], memory_bytes)
    return memory_bytes


class Largest(NamedTuple):
    """The largest size that fits."""

    size: int
    """The size; 0 if none fits."""
    graph: Graph | None
    """Graph of the step of that size."""


def largest_that_fits(
    make_graph: Callable[[int], Graph],
    on: str | Path | Cluster,
    memory_bytes: int | None = None,
    *,
    start: int,
    most: int,
    host_bytes: float = float("inf"),
    profile: Profile | None = None,
    calibration: Calibration | None = None,
    tell: Tell = lambda size, num_bytes, fits: None,
) -> Largest:
    """The largest size whose step ``make_graph(size)`` fits; ``tell`` is called after each try."""
    # What this machine is takes a while to find out; that is done once.
    place = find_cluster(on) if on == ON_THIS_MACHINE else on
    best = Largest(0, None)
    seen: set[str] = set()

    def missing_bytes(size: int) -> int:
        """Bytes that are missing; the budget is known from the problem alone."""
        nonlocal best
        graph = make_graph(size)
        if graph.content_hash in seen:
            raise UsageError(
                f"{graph.name} stays as it is whatever the size", hint="let something else grow"
            )
        seen.add(graph.content_hash)
        problem = make_problem(graph, place, profile=profile, calibration=calibration)
        budget_bytes = _budget_on_one(problem, memory_bytes)
        num_bytes = minimum_memory_bytes(problem, _on_one(problem), host_bytes)
        fits = num_bytes <= budget_bytes
        tell(size, num_bytes, fits)
        if fits and size > best.size:
            best = Largest(size, graph)
        return num_bytes - budget_bytes

    largest(missing_bytes, 0, start, most)
    return best


def save_fit(
    fitted: BudgetFit,
    path: str | Path,
    *,
    report: str | Path,
    graph_file: str | Path | None = None,
) -> None:
    """Write the plan with its memory section and the report, both or none of them."""
    from hocket.view.budgeted import AMONG_MANY
    from hocket.view.fit_report import fit_report_html

    plan = fitted.plan()
    if fitted.chosen is not None and plan.get(Memory) is not None:
        taken = format_seconds(fitted.chosen.step_s)
        plan = replace(plan, notes={**plan.notes, AMONG_MANY: taken})
    written = plan_bytes(path, fitted.frontier.problem, plan, graph_file=graph_file)
    write_together({path: written, report: fit_report_html(fitted).encode()})


def _on_one(problem: Problem) -> Plan:
    everywhere = np.zeros(problem.graph.num_ops, dtype=np.int32)
    return empty_plan(problem, PLANNER).placing(everywhere)
