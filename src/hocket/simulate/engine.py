"""Simulate a plan: lower it to instructions, run the event engine on them.

``docs/concepts/simulator.md`` describes the simulated model. The compiler is imported by
the first simulation, never before; a simulation is an evaluation of which all is kept, so that the
engine is compiled once. Complexity: see `hocket.simulate.lowering` and `hocket.simulate.events`.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.base.errors import CheckError, UsageError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Parallel, Schedule, Waves
from hocket.plan.training import TransformerTraining
from hocket.plan.transformer_plan import plan_stage_costs
from hocket.simulate.evaluate import Evaluator, try_changes
from hocket.simulate.instructions import Instructions
from hocket.simulate.lowering import order_priority, trimmed
from hocket.simulate.parallel import ExpandedStep, expand
from hocket.simulate.pipeline import simulate_pipeline
from hocket.simulate.rewriting.step import rewritten_step
from hocket.simulate.state import EngineState, MemoryState
from hocket.simulate.symmetry import for_all
from hocket.simulate.timeline import Timeline, step_timeline


def simulate(problem: Problem, plan: Plan) -> Timeline:
    """Simulate ``plan``: every span, and memory over time.

    Devices that need more memory than they have are no error here: the peaks show it. Parallel
    training of a transformer is timed by its schedule, one device per pipeline rank. The memory
    section of a plan is applied to the graph first, and the spans are those of `rewritten_step`.
    Raises `UsageError` for a plan that lacks a decision that the work needs, `CheckError` for one
    that cannot run.
    """
    if isinstance(problem.work, TransformerTraining):
        return simulate_pipeline(plan[Schedule], plan_stage_costs(problem, plan[Parallel]))
    shares = plan.get(Parallel)
    if shares is not None:
        return simulate_parallel(problem, shares, plan.get(Communication), plan.get(Waves))[1]
    problem, plan = rewritten_step(problem, plan)
    device_of, priority = _decisions(problem, plan)
    is_strict = plan.by_device is not None
    _, timeline = simulate_placement(problem, device_of, priority, is_strict=is_strict)
    if np.isnan(timeline.op_end_s).any():
        raise _deadlock(problem, plan, timeline)
    return timeline


def simulate_parallel(
    problem: Problem,
    shares: Parallel,
    planned: Communication | None = None,
    waves: Waves | None = None,
) -> tuple[ExpandedStep, Timeline]:
    """The graph of a step whose batch is split over devices, and its simulated timeline.

    The graph's ops have no names; `expand` gives it with them. Raises `CheckError` where stages
    wait for each other in a circle.
    """
    expanded = expand(problem, shares, planned, waves, is_named=False)
    _, timeline = simulate_placement(
        expanded.problem, expanded.device_of, expanded.priority, is_strict=expanded.is_strict
    )
    if np.isnan(timeline.op_end_s).any():
        raise CheckError(
            "stages of the pipeline wait for each other in a circle",
            hint="cut the model at other ops, where nothing goes back to an earlier stage",
        )
    if expanded.stands_for is not None:
        timeline = for_all(timeline, expanded.stands_for.tolist())
    return expanded, timeline


def simulate_placement(
    problem: Problem,
    device_of: IntArray,
    priority: FloatArray | None = None,
    *,
    is_strict: bool = False,
) -> tuple[Instructions, Timeline]:
    """The instructions of a placement, and their simulated timeline.

    Every op must be on a device that exists. ``priority`` is the position in the graph by default;
    with ``is_strict`` devices run ops in exactly that order, and times of ops that then can never
    start are not a number.
    """
    evaluator = Evaluator(problem, device_of)
    evaluator(device_of, priority, is_strict=is_strict)
    tables = trimmed(evaluator.buffers)
    return tables, _timeline(problem, tables, evaluator.state)


def lower(
    problem: Problem, device_of: IntArray, priority: FloatArray | None = None
) -> Instructions:
    """The instructions of a placement, in arrays of their own; as `simulate_placement`."""
    return simulate_placement(problem, device_of, priority)[0]


def instructions_of(problem: Problem, plan: Plan) -> Instructions:
    """Instructions of every device under ``plan``; raises as `simulate` does."""
    return lower(problem, *_decisions(problem, plan))


def kernels_are_compiled() -> bool:
    """True if the next simulation starts at once instead of compiling first."""
    from hocket.kernels import is_compiled

    return is_compiled(try_changes)


def _timeline(problem: Problem, tables: Instructions, state: EngineState) -> Timeline:
    spans, places, transfers = state.spans, tables.places, tables.transfers
    num = len(transfers.place)
    order = np.argsort(spans.transfer_start_s[:num], kind="stable")
    memory_ptr, memory_time_s, memory_bytes = _curves(state.memory)
    tensor = transfers.tensor[order]
    return step_timeline(
        op_device=tables.runs.device,
        op_stream=problem.graph.op_stream,
        op_ready_s=spans.op_ready_s,
        op_start_s=spans.op_start_s,
        op_end_s=spans.op_end_s,
        transfer_tensor=tensor,
        transfer_src=places.device[tensor],
        transfer_dst=places.device[transfers.place][order],
        transfer_ready_s=spans.transfer_ready_s[order],
        transfer_start_s=spans.transfer_start_s[order],
        transfer_end_s=spans.transfer_end_s[order],
        memory_ptr=memory_ptr,
        memory_time_s=memory_time_s,
        memory_bytes=memory_bytes,
        peak_bytes=state.memory.peak,
    )


# ── what the plan says, checked ──────────────────────────────────────────────────────────────────


def _decisions(problem: Problem, plan: Plan) -> tuple[IntArray, FloatArray | None]:
    """Device of each op, and the priorities or the strict order of ops."""
    device_of = _placement(problem, plan)
    if plan.by_device is not None:
        _check_order(problem, plan, device_of)
        return device_of, order_priority(plan.by_device)
    if plan.priority is not None and np.shape(plan.priority) != device_of.shape:
        what = f"{np.size(plan.priority)} priorities for {len(device_of)} ops"
        raise _mismatch(plan, f"the plan has {what}")
    return device_of, plan.priority


def _placement(problem: Problem, plan: Plan) -> IntArray:
    graph, names = problem.graph, problem.cluster.device_names
    if plan.device_of is None:
        raise UsageError(
            "the plan does not say where ops run",
            hint="run a placement planner first",
            where=plan.planner,
        )
    device_of = np.array(plan.device_of, dtype=np.int32)
    if device_of.shape != (graph.num_ops,):
        raise _mismatch(
            plan, f"the plan places {device_of.size} ops, the graph has {graph.num_ops}"
        )
    wrong = np.flatnonzero((device_of < 0) | (device_of >= len(names)))
    if len(wrong):
        op = int(wrong[0])
        raise _mismatch(
            plan,
            f"op {graph.op_names[op]!r} is on device {device_of[op]}, there are {len(names)}",
        )
    row = problem.costs.device_row[device_of]
    never = np.flatnonzero(~np.isfinite(problem.costs.op_s[row, np.arange(graph.num_ops)]))
    if len(never):
        op = int(never[0])
        raise CheckError(
            f"op {graph.op_names[op]!r} cannot run on {names[device_of[op]]!r}",
            hint="place it on a device of another kind",
            where=plan.planner,
        )
    return device_of


def _check_order(problem: Problem, plan: Plan, device_of: IntArray) -> None:
    """Each device must list its own ops once."""
    order = plan.by_device or ()
    if len(order) != problem.cluster.num_devices:
        raise _mismatch(
            plan,
            f"the plan orders {len(order)} devices, the cluster has {problem.cluster.num_devices}",
        )
    names = problem.graph.op_names
    line_up = np.concatenate([np.asarray(ops, dtype=np.int32).ravel() for ops in order])
    listed_on = np.repeat(np.arange(len(order)), [len(ops) for ops in order])
    if np.any((line_up < 0) | (line_up >= len(names))):
        raise _mismatch(plan, "the order names an op that does not exist")
    elsewhere = np.flatnonzero(device_of[line_up] != listed_on)
    if len(elsewhere):
        at = int(elsewhere[0])
        device = problem.cluster.device_names[int(listed_on[at])]
        raise _mismatch(plan, f"op {names[line_up[at]]!r} is in the order of {device!r}, not on it")
    times = np.bincount(line_up, minlength=len(names))
    wrong = np.flatnonzero(times != 1)
    if len(wrong):
        op = int(wrong[0])
        raise _mismatch(plan, f"op {names[op]!r} is in the order {times[op]} times, not once")


def _mismatch(plan: Plan, message: str) -> CheckError:
    hint = "plan this graph on this cluster again; the plan seems made for another"
    return CheckError(message, hint=hint, where=plan.planner)


def _deadlock(problem: Problem, plan: Plan, timeline: Timeline) -> CheckError:
    """The first device's op that cannot start, and the op that it waits for."""
    graph, names = problem.graph, problem.cluster.device_names
    missing, device_of = np.isnan(timeline.op_end_s), timeline.op_device
    for ops in plan.by_device or ():
        op = next((int(op) for op in ops if missing[op]), None)
        if op is None:
            continue
        producers = graph.tensor_producer[graph.reads_of(op)]
        tensor = next(
            (int(t) for t, p in zip(graph.reads_of(op), producers, strict=True)
             if p >= 0 and missing[p]),
            None,
        )  # fmt: skip
        if tensor is None:
            continue
        producer = int(graph.tensor_producer[tensor])
        return CheckError(
            f"op {graph.op_names[op]!r} can never start on {names[device_of[op]]!r}: it waits for "
            f"{graph.tensor_names[tensor]!r} of op {graph.op_names[producer]!r} on "
            f"{names[device_of[producer]]!r}, which in turn waits for it",
            hint="order the ops of each device so that producers come before their readers",
            where=plan.planner,
        )
    raise AssertionError("ops are missing though none waits for another")


def _curves(memory: MemoryState) -> tuple[LongArray, FloatArray, LongArray]:
    """The log by device, without entries that repeat the value before."""
    size = int(memory.size[0])
    device = memory.log_device[:size].astype(np.int16)
    order = np.argsort(device, kind="stable")
    device, num_bytes = device[order], memory.log_bytes[order]
    changes = np.ones(size, dtype=np.bool_)
    changes[1:] = (device[1:] != device[:-1]) | (num_bytes[1:] != num_bytes[:-1])
    counts = np.bincount(device[changes], minlength=len(memory.now))
    return pointers(counts), memory.log_time_s[order][changes], num_bytes[changes]
