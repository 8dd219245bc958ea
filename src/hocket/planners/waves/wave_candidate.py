"""Simulate the waves of a step on two streams, with the streams' waits and separate memory.

The caching allocator never reuses memory that another captured stream freed. So two waves that are
replayed as a CUDA graph hold the sum of the two streams' peaks, while an eager step, which runs on
one stream, holds the peak of both waves together. A wait of one stream for the other costs time in
a replayed graph (`WAIT_S`), so one wait covers many ops. O(simulation).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Waves
from hocket.plan.sections.waves import NUM_STREAMS
from hocket.planners.candidates import Candidate, empty_plan
from hocket.planners.devices import workers
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.parallel import ExpandedStep, priced_at
from hocket.simulate.parallel.wave_streams import (
    StreamMemory,
    WaveOp,
    on_stream,
    pass_order,
    stream_memory,
    stream_waits,
)
from hocket.simulate.timeline import Timeline

PLANNER = "waves"
TWO_STREAMS = "two streams"
WAIT_S = 8e-6
"""Cost of a wait of one stream for the other in a replayed graph, which the simulator does not
count: ResNet-56 with 32 samples took 7,067 us with 315 waits and 4,703 with 20 on an H200."""
FULL = 0.8
"""Busy fraction of device or host above which a wave leaves too little for a second one."""
_HALF = 0.5
"""Part of the device above which a kernel leaves no place for a second one of its size."""


class WaveSequence(NamedTuple):
    """Ops of all waves in the order in which they start, and the waits between the two streams."""

    ops: tuple[WaveOp, ...]
    waits: dict[WaveOp, WaveOp]
    """Ops that wait, each with the op of the other stream that it waits for."""


def wave_sequence(graph: Graph, passes: IntArray, timeline: Timeline) -> WaveSequence:
    """The order of ops of a simulated step, with waits that keep results equal to accumulation.

    A stream executes its waits in order, so only the latest op that has been awaited matters. An op
    that must wait waits for every op of the other stream that should have finished by then. Later
    ops then rarely need a wait of their own: streams that run k ops apart wait about once per k
    ops.
    """
    wave, op = np.nonzero(passes >= 0)
    number = passes[wave, op]
    order = np.lexsort((number, timeline.op_start_s[number]))
    # Views start no kernel, so they neither wait nor are awaited.
    works = ~graph.only_looks[op[order]]
    ops = [WaveOp(*at) for at in zip(wave[order].tolist(), op[order].tolist(), strict=True)]
    position = {at: place for place, at in enumerate(ops)}
    need = np.full(len(ops), -1, dtype=np.int64)
    num_waves = len(passes)
    for waiting, awaited in chain(stream_waits(graph, 0, num_waves), _sums(graph, num_waves)):
        later, earlier = position.get(waiting, -1), position.get(awaited, len(ops))
        if earlier < later:
            need[later] = max(need[later], earlier)
    stream = wave[order] % NUM_STREAMS
    waits: dict[WaveOp, WaveOp] = {}
    for one in range(NUM_STREAMS):
        own = np.flatnonzero((stream == one) & works)
        others = np.flatnonzero((stream != one) & works)
        needed = np.maximum.accumulate(np.where(stream == one, need, -1))[own]
        least = np.searchsorted(others, needed, "right") - 1
        # The last op of the other stream that began before this one may still run, so waiting for
        # it could block; the op before it has ended.
        over = np.searchsorted(others, own) - 2
        passed = -1
        for place, at_least, at_most in zip(own, least, over, strict=True):
            if at_least > passed:
                passed = max(at_least, at_most)
                waits[ops[place]] = ops[others[passed]]
    return WaveSequence(tuple(at for at, does in zip(ops, works, strict=True) if does), waits)


def _sums(graph: Graph, num_waves: int) -> Iterator[tuple[WaveOp, WaveOp]]:
    """Yield waiting and awaited ops, so that gradients are summed in the order of the waves."""
    is_made = (graph.tensor_role == Role.GRADIENT) & (graph.tensor_producer >= 0)
    makers = np.unique(graph.tensor_producer[is_made])
    makers = makers[graph.op_phase[makers] != Phase.OPTIMIZER]
    for wave in range(1, num_waves):
        for op in makers.tolist():
            yield WaveOp(wave, op), WaveOp(wave - 1, op)


@dataclass(frozen=True, eq=False, kw_only=True)
class WaveCandidate:
    """The simulated microbatches of a step, either one after the other or in waves."""

    parallel: Parallel
    waves: Waves | None
    step: ExpandedStep
    timeline: Timeline
    num_waits: int = 0
    """Number of waits of one stream for the other; 0 unless a CUDA graph is replayed."""

    @property
    def waits_s(self) -> float:
        """Time of the waits, which the simulator does not count."""
        return WAIT_S * self.num_waits

    @property
    def step_s(self) -> float:
        """Seconds of one step with its waits."""
        return self.timeline.makespan_s + self.waits_s

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all replicas together."""
        return self.parallel.num_samples / self.step_s

    @property
    def memory(self) -> StreamMemory:
        """Memory of each stream of the first device over time."""
        return stream_memory(self.step, self.timeline)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the fullest device."""
        return int(self.timeline.peak_bytes.max())


def simulated(problem: Problem, parallel: Parallel, waves: Waves | None = None) -> WaveCandidate:
    """Simulate a step, with the waits and the separate memory of replayed streams."""
    step, timeline = simulate_parallel(problem, parallel, None, waves)
    found = WaveCandidate(parallel=parallel, waves=waves, step=step, timeline=timeline)
    is_replayed = problem.costs.settings.get("launches") == "replayed"
    if waves is None or waves.changes == "wave" or not is_replayed:
        return found
    # The bytes of separate memory follow from a first simulation; the second one counts them.
    num_waits = len(wave_sequence(problem.graph, step.passes[0], timeline).waits)
    waves = replace(waves, separate_bytes=found.memory.separate_bytes)
    step, timeline = simulate_parallel(problem, parallel, None, waves)
    return replace(found, waves=waves, step=step, timeline=timeline, num_waits=num_waits)


def plan_of(problem: Problem, candidate: WaveCandidate) -> Plan:
    """The plan of a candidate with waves."""
    assert candidate.waves is not None
    plan = empty_plan(problem, PLANNER).having(candidate.parallel, candidate.waves)
    peaks = tuple(candidate.timeline.peak_bytes.tolist())
    return plan.claiming(step_s=candidate.step_s, peak_bytes=peaks)


def busy_shares(problem: Problem, num_samples: int) -> tuple[float, float]:
    """Fractions of its time for which a wave of ``num_samples`` samples keeps device and host busy.

    The wave runs alone. A kernel that fills more than half of the device counts as filling all of
    it, since no second kernel of that size could run at the same time.
    """
    wave = on_stream(priced_at(problem, num_samples), 0)
    demand, ops = wave.costs.demand, pass_order(wave.graph)
    assert demand is not None, "streams have it"
    row = int(wave.costs.device_row[workers(problem)[0]])
    seconds = wave.costs.op_s[row, ops]
    total_s = float(seconds.sum()) or 1.0
    on_device, on_host, fill, beside = demand[:, row, ops]
    filled = np.where(fill > _HALF, 1.0, np.where(fill > 0, fill, np.minimum(beside * _HALF, 1.0)))
    device_s, host_s = ((share * seconds).sum() for share in (on_device * filled, on_host))
    return float(device_s / total_s), float(host_s / total_s)


def two_stream_candidate(problem: Problem, candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the fastest candidate with microbatches as two waves; empty if that is not faster.

    A plan with microbatches has them because the batch does not fit at once, which is where waves
    can gain. Waves are simulated only if kernels leave some of device and host free. O(3
    simulations).
    """
    began = time.perf_counter()
    able = [each for each in candidates if each.step_s is not None and _can(each)]
    best = min(able, key=lambda each: each.step_s or 0.0, default=None)
    if best is None or best.plan is None or best.step_s is None:
        return []
    parallel = best.plan[Parallel]
    if max(busy_shares(problem, parallel.replicas[0].microbatches[0])) >= FULL:
        return []
    most = int(problem.memory_bytes[workers(problem)].min())
    # Both waves together, and Wavelet's half cycle: `wave_search` tries more, but takes longer.
    leads = (0, len(pass_order(problem.graph)) // 2)
    found = fastest_within([simulated(problem, parallel, Waves(lead=n)) for n in leads], most)
    if found is None or found.step_s >= best.step_s:
        return []
    return [
        Candidate(
            planner=TWO_STREAMS, plan=plan_of(problem, found), timeline=found.timeline,
            feasible=True, reason="", plan_seconds=time.perf_counter() - began,
            waits_s=found.waits_s,
        )
    ]  # fmt: skip


def fastest_within(candidates: Sequence[WaveCandidate], most_bytes: int) -> WaveCandidate | None:
    """Return the fastest candidate with a peak of at most ``most_bytes``; None if there is none."""
    fitting = [each for each in candidates if each.peak_bytes <= most_bytes]
    return min(fitting, key=lambda each: (each.step_s, each.peak_bytes), default=None)


def _can(candidate: Candidate) -> bool:
    """True if the candidate can run in waves.

    Every replica must be one device that runs several microbatches without recomputation, sharded
    state or updates on the host, and all replicas must have equally many microbatches.
    """
    parallel = None if candidate.plan is None else candidate.plan.get(Parallel)
    if parallel is None or parallel.sharded:
        return False
    counts = {len(replica.microbatches) for replica in parallel.replicas}
    are_plain = all(
        len(r.devices) == 1 and not r.recomputed and r.update == "device" for r in parallel.replicas
    )
    return are_plain and len(counts) == 1 and min(counts) > 1
