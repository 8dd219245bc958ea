"""Simulate a plan: lower it to instructions and run the event engine on them.

``docs/concepts/simulator.md`` describes the simulated model. The compiler is imported by the first
simulation. `simulate` runs the same compiled code as `hocket.simulate.evaluate` and keeps all of
its results, so that the engine is compiled once. For the complexity see `hocket.simulate.lowering`
and `hocket.simulate.events`.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.base.errors import CheckError, UsageError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Order, Parallel, Placement, Schedule, Waves
from hocket.plan.training import TransformerTraining
from hocket.simulate.evaluate import Evaluator, try_changes
from hocket.simulate.instructions import Instructions
from hocket.simulate.lowering import order_priority, trimmed
from hocket.simulate.parallel import ExpandedStep, expand
from hocket.simulate.rewriting.step import rewritten_step
from hocket.simulate.state import EngineState, MemoryState
from hocket.simulate.symmetry import for_all
from hocket.simulate.timeline import Timeline


def simulate(problem: Problem, plan: Plan) -> Timeline:
    """Simulate ``plan`` and return its timeline: every span, and memory over time.

    Devices that exceed their memory are not an error here; the peaks show it. A transformer's
    training is timed by its schedule, with one device per pipeline rank. A plan's memory section is
    applied to the graph first, so the spans are those of `rewritten_step`. Raises `UsageError` if
    the plan does not decide something that the work needs, `CheckError` if it cannot run.
    """
    if isinstance(problem.work, TransformerTraining):
        from hocket.plan.transformer_plan import plan_stage_costs
        from hocket.simulate.pipeline import simulate_pipeline

        return simulate_pipeline(plan[Schedule], plan_stage_costs(problem, plan[Parallel]))
    parallel = plan.get(Parallel)
    if parallel is not None:
        return simulate_parallel(problem, parallel, plan.get(Communication), plan.get(Waves))[1]
    problem, plan = rewritten_step(problem, plan)
    device_of, priority = _decisions(problem, plan)
    is_strict = plan.by_device is not None
    return simulate_placement(problem, device_of, priority, is_strict=is_strict)[1]


def simulate_parallel(
    problem: Problem,
    parallel: Parallel,
    planned: Communication | None = None,
    waves: Waves | None = None,
) -> tuple[ExpandedStep, Timeline]:
    """Return the graph of a step whose batch is split over devices, and its simulated timeline.

    The ops have no names; use `expand` for a graph with names. Raises `CheckError` if stages wait
    for each other in a cycle.
    """
    expanded = expand(problem, parallel, planned, waves, is_named=False)
    _, timeline = simulate_placement(
        expanded.problem, expanded.device_of, expanded.priority, is_strict=expanded.is_strict
    )
    # Ops that can never start keep NaN as their end.
    if np.isnan(timeline.op_end_s).any():
        raise CheckError(
            "stages of the pipeline wait for each other in a cycle",
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
    """Return the instructions of a placement, and their simulated timeline.

    Every op must be on an existing device. ``priority`` is the position in the graph by default.
    With ``is_strict`` devices run their ops in exactly that order; the times of ops that can never
    start are then NaN.
    """
    evaluator = Evaluator(problem, device_of)
    evaluator(device_of, priority, is_strict=is_strict)
    tables = trimmed(evaluator.buffers)
    return tables, _timeline(problem, tables, evaluator.state)


def lower(
    problem: Problem, device_of: IntArray, priority: FloatArray | None = None
) -> Instructions:
    """Return the instructions of a placement in new arrays; see `simulate_placement`."""
    return simulate_placement(problem, device_of, priority)[0]


def instructions_of(problem: Problem, plan: Plan) -> Instructions:
    """Return the instructions of every device under ``plan``; raises the errors of `simulate`."""
    return lower(problem, *_decisions(problem, plan))


def kernels_are_compiled() -> bool:
    """Return True if the next simulation need not compile kernels first."""
    from hocket.kernels import is_compiled

    return is_compiled(try_changes)


def _timeline(problem: Problem, tables: Instructions, state: EngineState) -> Timeline:
    spans, places, transfers = state.spans, tables.places, tables.transfers
    num = len(transfers.place)
    order = np.argsort(spans.transfer_start_s[:num], kind="stable")
    # The log holds the bytes after each change, sorted by time for each device.
    memory_ptr, memory_time_s, memory_bytes = _curves(state.memory)
    tensor = transfers.tensor[order]
    ends_s = np.append(spans.op_end_s, spans.transfer_end_s[:num])
    return Timeline(
        # The ends of ops that can never start are NaN.
        makespan_s=float(np.nanmax(ends_s, initial=0.0)),
        op_device=tables.runs.device.astype(np.int32),
        op_stream=problem.graph.op_stream,
        op_start_s=spans.op_start_s,
        op_end_s=spans.op_end_s,
        transfer_tensor=tensor.astype(np.int32),
        transfer_src=places.device[tensor].astype(np.int32),
        transfer_dst=places.device[transfers.place][order].astype(np.int32),
        transfer_ready_s=spans.transfer_ready_s[order],
        transfer_start_s=spans.transfer_start_s[order],
        transfer_end_s=spans.transfer_end_s[order],
        memory_ptr=memory_ptr,
        memory_time_s=memory_time_s,
        memory_bytes=memory_bytes,
        peak_bytes=state.memory.peak,
    )


# ── decisions of the plan ────────────────────────────────────────────────────────────────────────


def _decisions(problem: Problem, plan: Plan) -> tuple[IntArray, FloatArray | None]:
    """Return the device of each op, and the priorities or positions in strict orders."""
    placement, order = plan.get(Placement), plan.get(Order)
    if placement is None:
        raise UsageError(
            "the plan does not say where ops run",
            hint="run a placement planner first",
            where=plan.planner,
        )
    wrong = list(placement.wrong_devices(problem))
    if not wrong and order is not None:
        wrong = list(order.verify(problem, plan))
    if wrong:
        hint = "plan this graph on this cluster again; the plan seems made for another"
        raise CheckError(wrong[0].message, hint=hint, where=plan.planner)
    device_of = np.array(placement.device_of, dtype=np.int32)
    if plan.by_device is not None:
        return device_of, order_priority(plan.by_device)
    return device_of, plan.priority


def _curves(memory: MemoryState) -> tuple[LongArray, FloatArray, LongArray]:
    """Return the memory log sorted by device, without entries that repeat the value before."""
    size = int(memory.size[0])
    device = memory.log_device[:size].astype(np.int16)
    order = np.argsort(device, kind="stable")
    device, num_bytes = device[order], memory.log_bytes[order]
    changes = np.ones(size, dtype=np.bool_)
    changes[1:] = (device[1:] != device[:-1]) | (num_bytes[1:] != num_bytes[:-1])
    counts = np.bincount(device[changes], minlength=len(memory.now))
    return pointers(counts), memory.log_time_s[order][changes], num_bytes[changes]
