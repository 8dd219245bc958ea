"""Waves on two streams of one device: placement of ops, waits, and memory of both streams.

Microbatches alternate between the streams, and a stream runs its ops in graph order, forward before
backward. If an op waits for one of the other stream, the awaited op produces an empty tensor that
the waiting op reads. O(ops + reads).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import CheckError
from hocket.cost.demand import demand_of
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role, Stream
from hocket.plan.problem import Problem
from hocket.plan.sections import Waves
from hocket.plan.sections.waves import NUM_STREAMS
from hocket.simulate.parallel.graph_builder import StepBuilder
from hocket.simulate.parallel.replica_copy import ReplicaCopy
from hocket.simulate.storages import storage_spans
from hocket.simulate.timeline import Timeline

if TYPE_CHECKING:
    from hocket.simulate.parallel.expand import ExpandedStep

WAVE_STREAMS = (Stream.COMPUTE, Stream.SECOND)


class WaveOp(NamedTuple):
    """An op of one microbatch, given by the microbatch and the op of its graph."""

    wave: int
    op: int


@lru_cache(maxsize=64)
def on_stream(problem: Problem, stream: int) -> Problem:
    """Return the problem with its ops on one of the two streams, and their demand of the device."""
    graph = problem.graph
    is_compute = graph.op_stream == Stream.COMPUTE
    op_stream = np.where(is_compute, int(WAVE_STREAMS[stream]), graph.op_stream).astype(np.int8)
    costs = problem.costs
    if costs.demand is None:
        costs = replace(costs, demand=demand_of(graph, problem.cluster, costs))
    return replace(problem, work=replace(graph, op_stream=op_stream), op_costs=costs)


@lru_cache(maxsize=64)
def pass_order(graph: Graph) -> IntArray:
    """Return the ops of a wave in the order in which a stream runs them: forward, then backward."""
    ops = np.flatnonzero(graph.op_phase != Phase.OPTIMIZER)
    return ops[np.argsort(graph.op_phase[ops], kind="stable")].astype(np.int32)


def stream_waits(graph: Graph, lead: int, num_waves: int) -> Iterator[tuple[WaveOp, WaveOp]]:
    """Yield pairs of an op and the op of the other stream that it waits for.

    These are the lead, and waits that keep results equal to gradient accumulation: random numbers
    are drawn in the order of the waves, and state that outlives a step (batch norm statistics) is
    updated in that order.
    """
    order = pass_order(graph)
    if lead:
        # The lead delays the start of the second wave alone.
        yield WaveOp(1, int(order[0])), WaveOp(0, int(order[lead - 1]))
    drawing = order[graph.rng_order[order] >= 0]
    for wave in range(1, num_waves):
        if len(drawing):
            yield WaveOp(wave, int(drawing[0])), WaveOp(wave - 1, int(drawing[-1]))
        for op in _lasting_changes(graph).tolist():
            yield WaveOp(wave, op), WaveOp(wave - 1, op)


@lru_cache(maxsize=64)
def _lasting_changes(graph: Graph) -> IntArray:
    """Return the ops of a wave that update tensors from before the step in place."""
    changed = (
        np.isin(graph.tensor_role, PERSISTENT_ROLES)
        & (graph.tensor_producer >= 0)
        & (graph.tensor_producer[graph.root_of] < 0)
    )
    ops = np.unique(graph.tensor_producer[changed])
    found: IntArray = ops[graph.op_phase[ops] != Phase.OPTIMIZER].astype(np.int32)
    return found


def add_waits(graph: Graph, own: ReplicaCopy, waves: Waves, builder: StepBuilder) -> None:
    """Add the waits between streams and the memory that waves reserve.

    Raises `CheckError` if the section does not fit the graph.
    """
    wrong = next(waves.wrong_ops(graph, len(own.passes)), None)
    if wrong is not None:
        raise CheckError(wrong.message, hint="plan this step again with hocket waves")
    if waves.changes == "wave":
        _hold_copies(graph, own, builder)
    if waves.separate_bytes:
        name = f"separate memory of two streams{own.label}"
        held = builder.add_tensors([name], bytes=waves.separate_bytes, role=Role.BUFFER)
        _hold(graph, own, builder, held)
    for waiting, awaited in dict.fromkeys(stream_waits(graph, waves.lead, len(own.passes))):
        later, earlier = (own.passes[at.wave].op[at.op] for at in (waiting, awaited))
        if later < 0 or earlier < 0:
            continue  # runs once per step, after all waves
        name = f"wave {waiting.wave} op {waiting.op} waits for {awaited.op}{own.label}"
        signal = builder.add_tensors([name], role=Role.CONTROL, producer=[earlier])
        builder.add_reads(np.array([later]), signal)


def _hold_copies(graph: Graph, own: ReplicaCopy, builder: StepBuilder) -> None:
    """Reserve memory for each stream's copy of the parameters and one wave's gradients."""
    is_owner = (graph.tensor_producer < 0) & (graph.alias_of < 0)
    is_parameter = is_owner & (graph.tensor_role == Role.PARAMETER)
    parameters = int(graph.tensor_bytes[is_parameter].sum())
    names = [f"parameters of stream {stream}{own.label}" for stream in range(NUM_STREAMS)]
    names.append(f"gradients of the wave before{own.label}")
    held = builder.add_tensors(names, bytes=parameters, role=Role.BUFFER)
    _hold(graph, own, builder, held)


def _hold(graph: Graph, own: ReplicaCopy, builder: StepBuilder, held: IntArray) -> None:
    """Reserve memory for tensors on the device of a replica during the whole step."""
    ops = own.passes[0].op[pass_order(graph)]
    # Reading the tensors in the first op allocates them for the whole step (role BUFFER).
    builder.add_reads(np.repeat(ops[ops >= 0][:1], len(held)), held)


def updates_per_step(own: ReplicaCopy, waves: Waves | None) -> int:
    """Return how often a step sums gradients over replicas and updates the parameters."""
    return 1 if waves is None or waves.changes == "step" else len(own.passes)


def with_updates(problem: Problem, num_updates: int) -> Problem:
    """Return the problem with the times of all updates of a step."""
    if num_updates == 1:
        return problem
    op_s = problem.costs.op_s.copy()
    op_s[:, problem.graph.op_phase == Phase.OPTIMIZER] *= num_updates
    return replace(problem, op_costs=replace(problem.costs, op_s=op_s))


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamMemory:
    """Storages and workspaces of both streams of one device, with their lifetimes."""

    num_bytes: LongArray
    start_s: FloatArray
    end_s: FloatArray
    stream: IntArray
    """Stream of the op that allocates each storage or workspace."""

    def curve(self, stream: int | None = None) -> tuple[FloatArray, LongArray]:
        """Return times, and the bytes that one stream or both hold from each time on."""
        chosen = slice(None) if stream is None else self.stream == stream
        times = np.concatenate((self.start_s[chosen], self.end_s[chosen]))
        change = np.concatenate((self.num_bytes[chosen], -self.num_bytes[chosen]))
        # Of changes at one time, releases come first.
        order = np.lexsort((change, times))
        times, held = times[order], np.cumsum(change[order])
        last = np.ones(len(times), dtype=np.bool_)
        last[:-1] = np.diff(times) > 0
        return times[last], held[last]

    def peak_bytes(self, stream: int | None = None) -> int:
        """Return the peak of one stream, or the joint peak of both."""
        return int(self.curve(stream)[1].max(initial=0))

    @property
    def separate_bytes(self) -> int:
        """Sum of the peaks of both streams, minus their joint peak."""
        return sum(map(self.peak_bytes, range(NUM_STREAMS))) - self.peak_bytes()


def stream_memory(step: ExpandedStep, timeline: Timeline) -> StreamMemory:
    """Return the memory of the first replica's device over a step with waves."""
    graph = step.problem.graph
    is_here = step.device_of == int(step.device_of[step.passes[0][0].max()])
    producer = graph.tensor_producer
    owners = np.flatnonzero((producer >= 0) & (graph.held_bytes > 0) & is_here[producer])
    end_s = np.minimum(storage_spans(graph, timeline)[1][owners], timeline.makespan_s)
    working = np.flatnonzero(is_here & (graph.workspace_bytes > 0))
    makers = np.concatenate((producer[owners], working))
    return StreamMemory(
        num_bytes=np.concatenate((graph.held_bytes[owners], graph.workspace_bytes[working])),
        start_s=timeline.op_start_s[makers],
        end_s=np.concatenate((end_s, timeline.op_end_s[working])),
        stream=(graph.op_stream[makers] == WAVE_STREAMS[1]).astype(np.int32),
    )
