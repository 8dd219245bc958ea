"""A run from beginning to end: rebuild the model, split it, carry out the steps, compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hocket.base.errors import UsageError
from hocket.cost.costs import TimeSource
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes, Memory, Parallel
from hocket.plan.verify import raise_violations, structure_violations
from hocket.runtime.executors import EXECUTORS, choose
from hocket.runtime.executors.executor import PlacedProgram
from hocket.runtime.options import Onlookers, OnProgress, OnStart, OnStep, RunOptions
from hocket.runtime.rebuild import ModelSource, rebuild
from hocket.runtime.record import StepRecord, measured_timeline
from hocket.runtime.result import RunResult, middle_step
from hocket.runtime.room import require_room
from hocket.runtime.setup import Setup
from hocket.runtime.smaller import with_graph
from hocket.runtime.split import split
from hocket.simulate import simulate
from hocket.simulate.engine import instructions_of
from hocket.simulate.verify import update_violations

# What the walk over a recorded program adds to its ops on a processor.
#
# Op times are those of a call and of eager dispatch. A run looks tensors up, counts what is held,
# notes when each op began and ended and drops what nobody needs any more, all in Python; a
# processor does that itself, between two ops, while a GPU works meanwhile.

WALK_S = 9.3e-6
"""Per op. ``benchmarks/runtime/walk.py`` on an AMD EPYC, Python 3.11: a view takes 9.5 us and 4.5
more until the next op begins, where eager dispatch was measured as 4.7; the shortest of 35 steps,
op by op, so that other programs do not count."""


def with_walk(problem: Problem, places: Mapping[int, str]) -> Problem:
    """The problem with the times of a run on ``places``; stated times are what they are."""
    costs, devices = problem.costs, problem.cluster.devices
    rows = {
        int(costs.device_row[device])
        for device, place in places.items()
        if place == "cpu" and devices[device].kind.is_cpu
    }
    op_s = costs.op_s.copy()
    for row in rows:
        op_s[row] += WALK_S * (costs.op_source[row] != TimeSource.FILE)
    return replace(problem, op_costs=replace(costs, op_s=op_s))


_NUM_KEPT = 8
"""Last steps of which the one in the middle is shown."""


def run_plan(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    *,
    source: ModelSource | None = None,
    on_start: OnStart = lambda process_ids: None,
    on_step: OnStep = lambda number, record: None,
    on_progress: OnProgress = lambda what: None,
) -> RunResult:
    """Carry out a plan for some steps; ``on_step`` is told each one when it is done.

    ``on_start`` is told the process ids of the ranks, where there are any, ``on_progress`` what is
    being done. ``source`` is the planned model where it is at hand.
    """
    watch = Onlookers(on_start=on_start, on_step=on_step, on_progress=on_progress)
    if plan.get(Lanes) is not None:
        from hocket.runtime.sessions.waves import run_waves

        return run_waves(problem, plan, options, source, watch)
    parallel = plan.get(Parallel)
    if parallel is not None and parallel.layers is None:
        from hocket.runtime.sessions.shares import run_shares

        return run_shares(problem, plan, options, source, watch)
    if plan.get(Memory) is not None:
        from hocket.runtime.sessions.budget import run_budget

        return run_budget(problem, plan, options, source, watch)
    if parallel is None:
        return _run_placement(problem, plan, options, source, watch)
    from hocket.runtime.sessions.division import run_division

    return run_division(problem, plan, options, watch)


def _run_placement(
    problem: Problem,
    plan: Plan,
    options: RunOptions,
    source: ModelSource | None,
    watch: Onlookers,
) -> RunResult:
    """Carry out a placement: rebuild its model, split the program, hand it to the executor."""
    options.require_meaning("placement")
    if plan.device_of is None:
        raise UsageError("the plan does not say where ops run", hint="run a placement planner")
    found = list(structure_violations(plan, problem))
    found += [] if found else update_violations(plan.device_of, problem)
    raise_violations(found, plan.planner)
    used = np.unique(plan.device_of).tolist() or [0]
    devices = [problem.cluster.devices[device] for device in used]
    backend, found_places = choose("placement", options.backend, devices)
    executor, places = EXECUTORS["placement"][backend], dict(zip(used, found_places, strict=True))
    problem = with_walk(problem, places)
    predicted = simulate(problem, plan)
    _check_slowdown(options, problem, backend)
    num_processes = 1 + executor.processes_per_device * len(used)
    if options.scale == 1:
        # Before the model takes memory itself; a smaller batch is known only once it is captured.
        require_room(problem, predicted, places, num_processes=num_processes)
    watch.on_progress(f"building {problem.graph.name}")
    rebuilt = rebuild(
        problem.graph, model=options.model, source=source, seed=options.seed, scale=options.scale
    )
    if options.scale < 1:
        planned = problem.graph.meta.get("batch")
        problem = with_walk(with_graph(problem, rebuilt.graph), places)
        predicted = simulate(problem, plan)
        require_room(
            problem, predicted, places, num_processes=num_processes,
            planned_samples=planned if isinstance(planned, int) else None,
        )  # fmt: skip
    tables = instructions_of(problem, plan)
    parts = split(problem.graph, tables, timeline=predicted, order=plan.by_device)
    setup = Setup(problem.graph, rebuilt.program, plan.device_of, parts)
    seen: list[StepRecord] = []
    losses: list[float | None] = []
    step_s: list[float] = []

    def note(number: int, record: StepRecord) -> None:
        losses.append(record.loss)
        step_s.append(record.step_s)
        seen.append(record)
        del seen[:-_NUM_KEPT]
        watch.on_step(number, record)

    names = problem.cluster.device_names
    work = PlacedProgram(setup, rebuilt.values, names, places)
    executor.run(work, options, replace(watch, on_step=note))
    middle = middle_step(seen, step_s)
    return RunResult(
        backend=backend,
        runs_on={names[device]: places[device] for device in parts.used_devices},
        losses=tuple(losses),
        step_s=tuple(step_s),
        predicted_step_s=predicted.makespan_s,
        predicted=predicted,
        measured=measured_timeline(middle, plan.device_of, parts.transfers, len(names)),
        peak_bytes={
            names[device]: middle.peak_bytes.get(device, 0) for device in parts.used_devices
        },
    )


def _check_slowdown(options: RunOptions, problem: Problem, backend: str) -> None:
    if not options.slowdown:
        return
    for name, factor in options.slowdown.items():
        if name not in problem.cluster.device_names:
            raise UsageError(
                f"--slowdown names {name!r}, which the plan's cluster does not have",
                hint=f"it has {', '.join(problem.cluster.device_names)}",
            )
        if not 1.0 <= factor < math.inf:
            raise UsageError(f"--slowdown {name}={factor:g}: a device can only become slower",
                             hint="give a factor of 1 or more")  # fmt: skip
    if backend != "gloo":
        raise UsageError("--slowdown works with processes only", hint="add --backend gloo")
