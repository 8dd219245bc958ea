"""Check that a plan is legal: its structure, in-place updates, memory and other limits.

`verify` raises on violations, `violations` lists them. Results of all planners are checked here,
and loaded plans are checked again.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hocket.base.arrays import IntArray
from hocket.base.errors import CheckError
from hocket.base.units import format_bytes
from hocket.graph.graph import PERSISTENT_ROLES
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Memory, Parallel, Waves
from hocket.plan.training import TransformerTraining
from hocket.plan.transformer_plan import TransformerPlan, rank_memory_violations
from hocket.plan.verify import (
    contiguity_violations,
    raise_violations,
    structure_violations,
)
from hocket.plan.violation import Violation
from hocket.simulate.engine import simulate
from hocket.simulate.lowering import owner_devices
from hocket.simulate.parallel import expand
from hocket.simulate.parallel.wave_streams import stream_memory
from hocket.simulate.rewriting.blocks import blocks_of
from hocket.simulate.rewriting.chunks import has_logits
from hocket.simulate.rewriting.step import rewritten_step
from hocket.simulate.timeline import Timeline


def verify(plan: Plan, problem: Problem) -> None:
    """Raise `CheckError` with op and device of the first violations, if there are any."""
    raise_violations(violations(plan, problem), plan.planner)


def violations(plan: Plan, problem: Problem, timeline: Timeline | None = None) -> list[Violation]:
    """Return all violations; pass ``timeline`` if the plan was simulated before."""
    found = list(structure_violations(plan, problem))
    # A wrong structure would make the simulation fail.
    if found or problem.work is None:
        return found
    if isinstance(problem.work, TransformerTraining):
        return _config_violations(plan, problem, timeline)
    if plan.get(Parallel) is not None:
        return _share_violations(problem, plan, timeline)
    assert plan.device_of is not None, "structure was checked"
    found += update_violations(plan.device_of, problem)
    if problem.contiguous:
        found += contiguity_violations(plan.device_of, problem)
    executed, inner = rewritten_step(problem, plan)
    timeline = timeline or simulate(executed, inner)
    found += memory_violations(executed, timeline)
    memory = plan.get(Memory)
    if memory is not None:
        found += chunk_violations(problem, memory)
        found += budget_violations(problem, memory, timeline)
    return found


def _share_violations(problem: Problem, plan: Plan, timeline: Timeline | None) -> list[Violation]:
    """Return deadlocks between stages, and devices whose memory is exceeded.

    Also checks that waves reserve enough memory for two separate streams.
    """
    try:
        expanded = expand(problem, plan[Parallel], plan.get(Communication), plan.get(Waves))
        timeline = timeline or simulate(problem, plan)
    except CheckError as error:
        return [Violation("parallel", error.message)]
    found = list(memory_violations(expanded.problem, timeline))
    waves = plan.get(Waves)
    if waves is not None and waves.separate_bytes:
        needed = stream_memory(expanded, timeline).separate_bytes
        if waves.separate_bytes < needed:
            found.append(Violation(
                "waves",
                f"two streams hold {format_bytes(needed)} beyond their joint peak, and the plan "
                f"reserves {format_bytes(waves.separate_bytes)}",
            ))  # fmt: skip
    return found


def _config_violations(plan: Plan, problem: Problem, timeline: Timeline | None) -> list[Violation]:
    """Return deadlocks between pipeline ranks, and devices whose memory is exceeded."""
    try:
        timeline = timeline or simulate(problem, plan)
    except CheckError as error:
        return [Violation("schedule", error.message)]
    # What the plan predicts is a claim; what its costs and schedule give is what counts.
    peaks = tuple(timeline.peak_bytes.tolist())
    return list(rank_memory_violations(TransformerPlan(problem, plan), peaks))


def update_violations(device_of: IntArray, problem: Problem) -> Iterator[Violation]:
    """Yield in-place updates of persistent tensors that run on another device than the tensor's."""
    graph = problem.graph
    updates = np.flatnonzero(
        np.isin(graph.tensor_role, PERSISTENT_ROLES)
        & (graph.alias_of >= 0)
        & (graph.tensor_producer >= 0)
        & (graph.tensor_producer[graph.root_of] < 0)
    )
    if not len(updates):
        return
    owners = owner_devices(graph, device_of)
    for tensor in updates:
        base = int(graph.root_of[tensor])
        op = int(graph.tensor_producer[tensor])
        owner = owners[base]
        if device_of[op] != owner:
            names = problem.cluster.device_names
            yield Violation(
                "updates",
                f"op {graph.op_names[op]!r} on {names[device_of[op]]!r} updates "
                f"{graph.tensor_names[base]!r}, which lives on {names[owner]!r}",
                graph.op_names[op],
                names[device_of[op]],
            )


def memory_violations(problem: Problem, timeline: Timeline) -> Iterator[Violation]:
    """Yield devices that hold more bytes than they have, with the op that runs at the peak."""
    usable = problem.memory_bytes.tolist()
    for device, spec in enumerate(problem.cluster.devices):
        peak = int(timeline.peak_bytes[device])
        if peak <= usable[device]:
            continue
        op = _op_at_peak(problem, timeline, device)
        yield Violation(
            "memory",
            f"{spec.name} needs {format_bytes(peak)} of {format_bytes(usable[device])}",
            op,
            spec.name,
        )


def chunk_violations(problem: Problem, memory: Memory) -> Iterator[Violation]:
    """Yield a violation if the loss is in chunks but the last block does not compute it."""
    graph = problem.graph
    if memory.loss_chunks > 1 and not has_logits(graph, blocks_of(graph, memory)):
        yield Violation(
            "memory",
            f"the loss is in {memory.loss_chunks} chunks, but the last block "
            f"({memory.blocks[-1].name!r}) does not have both it and the layer before it",
        )


def budget_violations(problem: Problem, memory: Memory, timeline: Timeline) -> Iterator[Violation]:
    """Yield devices that hold more bytes than their memory budget."""
    peaks = timeline.peak_bytes.tolist()
    for spec, peak, budget in zip(problem.cluster.devices, peaks, memory.budget_bytes, strict=True):
        if peak > budget:
            yield Violation(
                "memory",
                f"{spec.name} holds {format_bytes(peak)} of its budget of {format_bytes(budget)}",
                device=spec.name,
            )


def _op_at_peak(problem: Problem, timeline: Timeline, device: int) -> str:
    times, held = timeline.memory_curve(device)
    if not len(held):
        return ""
    when = times[int(np.argmax(held))]
    running = np.flatnonzero(
        (timeline.op_device == device) & (timeline.op_start_s <= when) & (timeline.op_end_s >= when)
    )
    return problem.graph.op_names[running[-1]] if len(running) else ""
