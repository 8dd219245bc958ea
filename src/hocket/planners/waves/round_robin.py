"""Model parallelism in waves: partitions go round robin over the devices (Wavelet, on models).

A model in N partitions on N devices, one after the other, leaves N - 1 devices idle. N waves
(microbatches of equal size) fill them: wave w computes its partition s on device (w + s) mod N, so
in every slot each device computes another wave, forward through all partitions and then backward.
Activations of a wave stay on their device until its backward pass. The gradients of a partition are
summed over all devices after its last slot. Each device holds two partitions at a time: the one
that it computes and the next one, which it prefetches.

The waves are simulated as pipelines over the same devices in rotated order, with transfers between
partitions, the gradient all-reduce and memory. Fetches of partitions that no slot hides and a
constant fraction of the time for switching are added. O(one simulation).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.base.errors import UsageError
from hocket.graph.graph import Phase, Role
from hocket.hardware.host_route import host_route
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Replica
from hocket.planners.candidates import empty_plan
from hocket.planners.devices import workers
from hocket.planners.memory.blocks import cut_step
from hocket.planners.waves.wave_candidate import PLANNER
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.parallel import priced_at
from hocket.simulate.parallel.stage_order import places_of, stages_of
from hocket.simulate.timeline import Timeline

SWITCHING = 0.04
"""Fraction by which switching partitions lengthens a step; published for V100."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RoundRobin:
    """Round-robin waves of a partitioned model, with their simulated time and memory."""

    parallel: Parallel
    timeline: Timeline
    """Timeline of a simulation in which every device holds all partitions."""
    slot_s: float
    """The longest forward or backward pass of a wave through one partition."""
    fetch_s: float
    """Time to fetch the largest partition from the host."""
    num_slots: int
    peak_bytes: int
    """Peak per device: activations, two partitions, gradients of one, part of other state."""

    @property
    def stall_s(self) -> float:
        """Fetch time that the slots do not hide."""
        return self.num_slots * max(0.0, self.fetch_s - self.slot_s)

    @property
    def step_s(self) -> float:
        """Seconds of a step of all waves, with switching and exposed fetches."""
        return self.timeline.makespan_s * (1 + SWITCHING) + self.stall_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all waves together."""
        return self.parallel.num_samples / self.step_s


@dataclass(frozen=True, kw_only=True)
class PartitionCandidate:
    """One way to train a partitioned model, with its step time and peak memory."""

    name: str
    step_s: float
    samples_per_s: float
    peak_bytes: int


@dataclass(frozen=True, eq=False, kw_only=True)
class PartitionFit:
    """Round-robin waves, compared with plain model parallelism and a pipeline."""

    problem: Problem
    turns: RoundRobin
    candidates: tuple[PartitionCandidate, ...]
    """Plain model parallelism, the 1F1B pipeline and round-robin waves, in this order."""

    @property
    def gain(self) -> float:
        """Samples per second of round robin divided by those of the better alternative."""
        *others, own = self.candidates
        return own.samples_per_s / max(each.samples_per_s for each in others)

    @property
    def budget_bytes(self) -> int:
        """Memory of the device with the least memory."""
        return int(self.problem.memory_bytes[workers(self.problem)].min())

    @property
    def best(self) -> PartitionCandidate | None:
        """The fastest candidate that fits into memory; None if none fits."""
        fitting = [each for each in self.candidates if each.peak_bytes <= self.budget_bytes]
        return min(fitting, key=lambda each: each.step_s, default=None)

    def plan(self) -> Plan:
        """The plan of the round-robin waves."""
        timeline = self.turns.timeline
        plan = empty_plan(self.problem, PLANNER).having(self.turns.parallel)
        return plan.claiming(
            step_s=timeline.makespan_s, peak_bytes=tuple(timeline.peak_bytes.tolist())
        )


def fit_partitions(problem: Problem) -> PartitionFit:
    """Plan round-robin waves: as many partitions and as many equal waves as there are devices.

    Raises `UsageError` for one device, or if the model or the batch cannot be split.
    """
    other, names = problem.graph.other_batch, problem.cluster.device_names
    count = len(names)
    if count < 2:
        raise UsageError("partitions are for two devices or more", hint="give --on 4xv100-16g")
    if other is None or other.num_samples % count:
        raise UsageError(
            f"the batch does not make {count} equal waves",
            hint=f"give a model and a batch that is a multiple of {count}",
        )
    wave, cuts = other.num_samples // count, even_cuts(problem, count)
    if len(cuts) != count - 1:
        raise UsageError(
            f"{problem.graph.name} cannot be cut into {count} partitions",
            hint="take fewer devices",
        )
    turns = round_robin(problem, cuts, wave)
    pipeline = Replica(devices=names, microbatches=(wave,) * count, cuts=cuts)
    _, piped = simulate_parallel(problem, Parallel(replicas=(pipeline,)))
    plain = Replica(devices=names, microbatches=(other.num_samples,), cuts=cuts)
    _, alone = simulate_parallel(problem, Parallel(replicas=(plain,)))
    candidates = [
        ("plain model parallel", alone.makespan_s, int(alone.peak_bytes.max())),
        (f"1F1B, {count} microbatches", piped.makespan_s, int(piped.peak_bytes.max())),
        ("waves in turn", turns.step_s, turns.peak_bytes),
    ]
    return PartitionFit(
        problem=problem,
        turns=turns,
        candidates=tuple(
            PartitionCandidate(name=name, step_s=step_s, samples_per_s=other.num_samples / step_s,
                         peak_bytes=peak)
            for name, step_s, peak in candidates
        ),
    )  # fmt: skip


def even_cuts(problem: Problem, count: int) -> tuple[int, ...]:
    """First ops of partitions 1 to ``count - 1``, chosen so that all partitions take equally long.

    Cuts lie between blocks, where few bytes cross, or between any ops if the model has few blocks.
    The result is empty if there are not enough places to cut.
    """
    graph, row = problem.graph, int(problem.costs.device_row[0])
    place = places_of(graph)
    seconds = np.bincount(place, problem.costs.op_s[row], graph.num_ops)
    passed = np.cumsum(seconds) / seconds.sum()
    works = (graph.op_phase == Phase.FORWARD) & graph.works
    for places in (cut_step(graph).start[1:-1], np.unique(place[works])[1:]):
        if len(places):
            nearest = (np.argmin(abs(passed[places - 1] - i / count)) for i in range(1, count))
            found = tuple(sorted({int(places[at]) for at in nearest}))
            # Several targets may have the same nearest place; then there are too few cuts.
            if len(found) == count - 1:
                return found
    return ()


def round_robin(problem: Problem, cuts: tuple[int, ...], wave_samples: int) -> RoundRobin:
    """Simulate one wave of ``wave_samples`` samples per device, with the model split at cuts."""
    names = problem.cluster.device_names
    count = len(names)
    parallel = Parallel(
        replicas=tuple(
            Replica(devices=names[wave:] + names[:wave], microbatches=(wave_samples,), cuts=cuts)
            for wave in range(count)
        )
    )
    _, timeline = simulate_parallel(problem, parallel)
    wave = priced_at(problem, wave_samples)
    graph, stage = wave.graph, stages_of(wave.graph, cuts)
    passes = graph.op_phase != Phase.OPTIMIZER
    seconds = np.zeros((2, count))
    # Round robin needs equal devices, so the first one stands for all.
    row = int(problem.costs.device_row[0])
    np.add.at(seconds, (graph.op_phase[passes], stage[passes]), wave.costs.op_s[row, passes])
    weights, lasting = _partition_bytes(problem, stage, count)
    # The simulation holds all partitions with their gradients; without them, activations remain.
    made = int(timeline.peak_bytes.max()) - int(lasting.sum()) - int(weights.sum())
    route = host_route(problem.cluster, problem.cluster.devices[0])
    largest = int(weights.max())
    return RoundRobin(
        parallel=parallel,
        timeline=timeline,
        slot_s=float(seconds.max()),
        fetch_s=route.latency_s + largest / route.in_bps,
        num_slots=2 * count,
        # Two partitions and gradients of one are three times the largest partition. Each device
        # holds the optimizer state of one partition.
        peak_bytes=max(made, 0) + 3 * largest + int(lasting.sum() - weights.sum()) // count,
    )


def _partition_bytes(problem: Problem, stage: IntArray, count: int) -> tuple[LongArray, LongArray]:
    """Bytes per partition: of its parameters, and of all tensors that exist before the step."""
    graph = problem.graph
    owner = graph.owner_op  # the op on whose device a parameter is stored
    before = np.flatnonzero((graph.tensor_producer < 0) & (owner >= 0) & (graph.held_bytes > 0))
    weights, lasting = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    of = stage[owner[before]]
    np.add.at(lasting, of, graph.held_bytes[before])
    is_weight = graph.tensor_role[before] == Role.PARAMETER
    np.add.at(weights, of[is_weight], graph.held_bytes[before[is_weight]])
    return weights, lasting
