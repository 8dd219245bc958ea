"""``hocket.fit``: fit a training step into a memory budget on one device.

The file also finds the largest size (batch or sequence length) that fits, and writes plan and
report files.
"""

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
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Memory
from hocket.planners.candidates import empty_plan
from hocket.planners.memory.budget import BudgetFit, keep_budget
from hocket.planners.memory.frontier import minimum_memory_bytes
from hocket.planners.memory.given_budget import (
    BudgetWarning,
    budget_of,
    require_memory,
    require_one_device,
    unusable_note,
)
from hocket.planners.memory.largest import largest

PLANNER = "memory"
OnTry = Callable[[int, int, bool], None]
"""Callback for each size: the size, the bytes that it needs, True if it fits."""


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

    By default the budget is the memory of the device without its headroom. ``host_bytes`` limits
    the memory on the host; ``async_update`` is the option of `hocket.prepare`. If no plan fits,
    ``chosen`` of the result is None and ``plan()`` raises `NoFeasiblePlanError`.
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
    """Fit an existing problem like `fit`, without the warning about unusable memory."""
    budget_bytes = _budget_of(problem, memory_bytes)
    return keep_budget(
        problem, _on_one(problem), budget_bytes, host_bytes=host_bytes, async_update=async_update
    )


def _budget_of(problem: Problem, memory_bytes: int | None) -> int:
    """Return the budget on the one device of a problem, by default its usable memory."""
    require_one_device(problem.cluster)
    if memory_bytes is None:
        # The headroom may exceed the memory of a small device.
        return max(int(problem.memory_bytes[0]), 0)
    require_memory(problem.cluster.devices[0], memory_bytes)
    return memory_bytes


class Largest(NamedTuple):
    """The largest size that fits."""

    size: int
    """The size; 0 if none fits."""
    problem: Problem | None
    """Training with that size."""


def largest_that_fits(
    make: Callable[[int], Problem],
    memory_bytes: int | None = None,
    *,
    start: int,
    most: int,
    host_bytes: float = float("inf"),
    on_try: OnTry = lambda size, num_bytes, fits: None,
) -> Largest:
    """Return the largest size, from 1 to ``most``, whose problem ``make(size)`` fits the budget."""
    best = Largest(0, None)
    seen: set[str] = set()

    def missing_bytes(size: int) -> int:
        nonlocal best
        problem = make(size)
        # If a model ignored the size, the search for a size that does not fit would never end.
        if problem.graph.content_hash in seen:
            raise UsageError(
                f"{problem.graph.name} is the same for each size", hint="choose another --max"
            )
        seen.add(problem.graph.content_hash)
        budget_bytes = _budget_of(problem, memory_bytes)
        num_bytes = minimum_memory_bytes(problem, _on_one(problem), host_bytes)
        fits = num_bytes <= budget_bytes
        on_try(size, num_bytes, fits)
        if fits and size > best.size:
            best = Largest(size, problem)
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
    """Write the plan and the report atomically: both files or none."""
    from hocket.view.budgeted import AMONG_MANY
    from hocket.view.fit_report import fit_report_html

    plan = fitted.plan()
    if fitted.chosen is not None and plan.get(Memory) is not None:
        notes = {**plan.notes, AMONG_MANY: format_seconds(fitted.chosen.step_s)}
        plan = replace(plan, notes=notes)
    written = plan_bytes(path, fitted.frontier.problem, plan, graph_file=graph_file)
    write_together({path: written, report: fit_report_html(fitted, Path(path).name).encode()})


def _on_one(problem: Problem) -> Plan:
    everywhere = np.zeros(problem.graph.num_ops, dtype=np.int32)
    return empty_plan(problem, PLANNER).placing(everywhere)
