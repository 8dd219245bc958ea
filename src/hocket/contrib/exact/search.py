"""Solve the model: the best schedule found within a fixed amount of work, and what it proves."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.contrib.exact.instance import Instance
from hocket.contrib.exact.memory import add_memory
from hocket.contrib.exact.model import Model, add_devices, break_symmetry, build_model
from hocket.contrib.exact.prompt import add_promptness
from hocket.contrib.exact.transfers import add_transfers
from hocket.plan.plan import Plan
from hocket.planners.bounds.classes import BoundClasses
from hocket.planners.bounds.heads import Heads
from hocket.planners.placement.exact.symmetry import first_use_order, interchangeable
from hocket.simulate.timeline import Timeline

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntVar

WORK = 4.0
"""Work after which the search stops, in the solver's own count: tens of seconds."""
_TIDY_WORK = 0.5
_MAX_RAISES = 2_000
"""A search may raise its bound tick by tick, which is work that the solver does not count."""
_ROUNDING = 1e-11


@dataclass(frozen=True, eq=False)
class ExactFound:
    """What one search found."""

    bound_s: float
    """No plan within the memory that was given has a shorter step; infinite if there is none."""
    device_of: IntArray | None
    """None where nothing was found."""
    start: LongArray
    """Ticks at which ops start."""
    end: LongArray

    def plans(self, plan: Plan, num_devices: int) -> list[Plan]:
        """The schedule as a plan: as strict orders, and as priorities."""
        if self.device_of is None:
            return []
        line_up = np.lexsort((np.arange(len(self.end)), self.end, self.start)).astype(np.int32)
        devices = self.device_of[line_up]
        order = tuple(line_up[devices == device] for device in range(num_devices))
        placed = plan.placing(self.device_of)
        rank = np.argsort(line_up).astype(np.float64)
        return [placed.ordered(by_device=order), placed.ordered(priority=rank)]


def search(
    instance: Instance,
    classes: BoundClasses,
    heads: Heads,
    memory_bytes: LongArray,
    known: Timeline | None,
    work: float = WORK,
) -> ExactFound:
    """Solve the model from a known plan; the same every time."""
    longest_s = known.makespan_s if known is not None else instance.longest_s
    # One tick more than needed: the known plan stays a solution whatever rounding does.
    model = build_model(instance, int(instance.ticks(np.array([longest_s]))[0]) + 1)
    add_devices(model, classes, heads)
    transfer_start = add_transfers(model)
    is_scarce = add_memory(model, memory_bytes, transfer_start)
    # Among others a transfer takes longer than the model knows, and so may what waits for it.
    if (is_scarce or transfer_start) and instance.problem.transfers != "shared":
        add_promptness(model, transfer_start)
    fixed = frozenset({0} if instance.units.unread_bytes else ())
    sets = interchangeable(instance.problem, instance.tasks, fixed)
    break_symmetry(model, sets)
    if known is not None:
        _hint(model, known, sets)
    model.cp.minimize(model.makespan)
    solver, bound_s = _solve_twice(model, work)
    if solver is None:
        is_bound = known is None or np.isfinite(bound_s)
        return ExactFound(bound_s if is_bound else 0.0, None, *_no_times())
    if transfer_start and not _is_reached(model, solver, known):
        solver = _without_delays(model, list(transfer_start.values()), solver)
    place = np.array([[solver.value(literal) for literal in row] for row in model.place])
    return ExactFound(
        bound_s,
        place.argmax(axis=1).astype(np.int32)[instance.units.of_op],
        np.array([solver.value(start) for start in model.start], dtype=np.int64),
        np.array([solver.value(end) for end in model.end], dtype=np.int64),
    )


def _solve_twice(model: Model, work: float) -> tuple[CpSolver | None, float]:
    """The solver with the better solution, and the bound; infinite where there is no solution.

    The usual search finds short schedules and proves most of them; one that raises the bound step
    by step finds few, but proves some of those that are left.
    """
    best, bound, best_value = None, 0.0, np.inf
    for raises_bound in (False, True):
        solver = _solver(model, work / 2)
        solver.parameters.optimize_with_lb_tree_search = raises_bound
        _limit_raises(solver)
        has_solution = _solve(solver, model)
        if has_solution is None:
            return None, np.inf
        bound = max(bound, solver.best_objective_bound)
        if has_solution and solver.objective_value < best_value:
            best, best_value = solver, solver.objective_value
        if bound >= best_value:
            break
    return best, bound / model.instance.ticks_per_s * (1 - _ROUNDING)


def _solver(model: Model, work: float) -> CpSolver:
    from ortools.sat.python.cp_model import CpSolver

    solver = CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = model.instance.problem.seed
    solver.parameters.max_deterministic_time = work
    return solver


def _limit_raises(solver: CpSolver) -> None:
    raises = count()

    def stop_if_many(_bound: float) -> None:
        if next(raises) == _MAX_RAISES:
            solver.stop_search()

    solver.best_bound_callback = stop_if_many


def _solve(solver: CpSolver, model: Model) -> bool | None:
    """Whether a solution was found; None where there is none."""
    from ortools.sat.python import cp_model

    status = solver.solve(model.cp)
    if status == cp_model.INFEASIBLE:
        return None
    return status in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def _no_times() -> tuple[LongArray, LongArray]:
    return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)


def _is_reached(model: Model, solver: CpSolver, known: Timeline | None) -> bool:
    """Whether the known plan is as short as what was found."""
    if known is None:
        return False
    known_ticks = int(model.instance.ticks(np.array([known.makespan_s]))[0])
    return known_ticks <= int(solver.value(model.makespan))


def _without_delays(model: Model, sent: list[IntVar], solver: CpSolver) -> CpSolver:
    """A schedule as short in which transfers start as early as they can.

    The model may hold a transfer back, and with it an op, which no plan can say.
    """
    model.cp.add(model.makespan <= solver.value(model.makespan))
    model.cp.clear_hints()  # type: ignore[no-untyped-call]
    for variable in (*model.start, *sent, *(here for row in model.place for here in row)):
        model.cp.add_hint(variable, solver.value(variable))
    model.cp.minimize(sum(sent) + sum(model.start))
    earlier = _solver(model, _TIDY_WORK)
    return earlier if _solve(earlier, model) else solver


def _hint(model: Model, known: Timeline, sets: list[list[int]]) -> None:
    instance = model.instance
    _, first_op = np.unique(instance.units.of_op, return_index=True)
    device_of_unit = first_use_order(known.op_device[first_op], sets)
    for unit, literals in enumerate(model.place):
        for device, literal in enumerate(literals):
            model.cp.add_hint(literal, bool(device_of_unit[unit] == device))
    for op, start in enumerate(instance.ticks(known.op_start_s).tolist()):
        model.cp.add_hint(model.start[op], start)
    model.cp.add_hint(model.makespan, int(instance.ticks(np.array([known.makespan_s]))[0]))
