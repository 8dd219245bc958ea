"""Search for the start of the second wave: the shortest step whose two waves fit into memory.

Wavelet (Wang et al., MLSys 2021) starts the second wave half a cycle after the first, so that its
memory grows while that of the first shrinks. The best lead depends on the model and on how much of
the device its kernels leave idle: an earlier start lets the streams overlap more, a later one lets
them hold fewer bytes together (if they share memory, see `wave_candidate`). So starts spread evenly
over the time of the first wave are simulated, then ever closer ones around the best. The chosen one
is compared with the same samples without waves. O(tries) simulations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.parts import even_parts
from hocket.base.units import format_bytes, format_percent, format_seconds, typed_bytes
from hocket.graph.graph import Phase, Stream
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Replica, Waves
from hocket.plan.sections.waves import NUM_STREAMS, Changes
from hocket.planners.devices import workers
from hocket.planners.waves.wave_candidate import (
    FULL,
    WaveCandidate,
    busy_shares,
    fastest_within,
    plan_of,
    simulated,
)
from hocket.simulate.parallel import priced_at
from hocket.simulate.parallel.wave_streams import pass_order

_FIRST_TRIES = 17
"""Number of starts tried first, spread over the first wave and including both of its ends."""
_FINER = 3
"""Number of times that the distance between tries around the best start is halved."""
CLOSE = 1.12
"""Gain (ratio of samples per second) below which it is within the error of the predictions.

For ResNet-56 with 256 samples, the one workload in which two streams paid on an H200, five
predictions were 12 % too high, 14, 4 and 6 % too low, and right
(`benchmarks/results/2026-11-17-waves-h200.md` and ``-earlier.md``).
"""
EQUAL = 0.005
"""Relative difference in samples per second below which two candidates are called equal."""
_MUCH = 0.1
"""Fraction of the step from which a cause of lost time is named in the explanation."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WaveFit:
    """All simulated starts of the second wave, and the same samples without waves."""

    problem: Problem
    budget_bytes: int
    plain: WaveCandidate
    """All samples of a device in one microbatch."""
    accumulated: WaveCandidate
    """The microbatches one after the other, with accumulated gradients."""
    tried: tuple[WaveCandidate, ...]
    """Every simulated start of the second wave, in ascending order."""

    @property
    def aligned(self) -> WaveCandidate:
        """The candidate whose two waves begin together."""
        return self.tried[0]

    @cached_property
    def smallest(self) -> WaveCandidate:
        """The candidate with the lowest peak among those whose waves overlap."""
        return min(self._overlapping, key=lambda each: (each.peak_bytes, each.step_s))

    @cached_property
    def chosen(self) -> WaveCandidate | None:
        """The fastest candidate within the budget whose waves overlap; None if none fits."""
        return fastest_within(self._overlapping, self.budget_bytes)

    @property
    def shown(self) -> WaveCandidate:
        """The chosen candidate, or the one with the lowest peak if none fits."""
        return self.chosen or self.smallest

    @property
    def _overlapping(self) -> list[WaveCandidate]:
        whole = len(pass_order(self.problem.graph))
        # A lead of a whole pass means that the waves do not overlap.
        return [each for each in self.tried if each.waves is not None and each.waves.lead < whole]

    @property
    def best_alone(self) -> WaveCandidate | None:
        """The faster step without waves that fits the budget; None if none fits."""
        return fastest_within((self.plain, self.accumulated), self.budget_bytes)

    @property
    def gain(self) -> float | None:
        """Samples per second relative to `best_alone`; None if one of the two is missing."""
        if self.chosen is None or self.best_alone is None:
            return None
        return self.chosen.samples_per_s / self.best_alone.samples_per_s

    @property
    def pays(self) -> bool:
        """True if the chosen waves are faster than steps without waves, or if only waves fit."""
        return self.chosen is not None and (self.gain is None or self.gain >= 1 + EQUAL)

    @property
    def is_equal(self) -> bool:
        """True if steps with and without waves take equally long (within `EQUAL`)."""
        return self.gain is not None and abs(self.gain - 1) < EQUAL

    @property
    def is_close(self) -> bool:
        """True if the waves pay by a gain that is within the error of the predictions (`CLOSE`)."""
        return self.gain is not None and self.pays and self.gain < CLOSE

    @property
    def one_wave_bytes(self) -> int:
        """Peak memory of a step that runs one microbatch after the other."""
        return self.accumulated.peak_bytes

    def plan(self) -> Plan:
        """The plan of the chosen waves; raises `NoFeasiblePlanError` if none fit."""
        if self.chosen is None:
            least = self.smallest.peak_bytes
            raise NoFeasiblePlanError(
                f"two waves of {self.problem.graph.name} do not fit into "
                f"{format_bytes(self.budget_bytes)}: they need {format_bytes(least)}",
                hint=f"give them {typed_bytes(least)}, or make the batch smaller",
            )
        return self.plan_of(self.chosen)

    def plan_of(self, candidate: WaveCandidate) -> Plan:
        """The plan of one of the simulated candidates."""
        return plan_of(self.problem, candidate)


def fit_waves(
    problem: Problem,
    *,
    num_waves: int = NUM_STREAMS,
    budget_bytes: int | None = None,
    changes: Changes = "step",
) -> WaveFit:
    """Search the start of the second wave; every device gets an equal part of the batch.

    ``budget_bytes`` is the memory budget of each device, by default all of its memory. ``changes``
    says whether parameters change after every step or after every wave. Raises `UsageError` for a
    batch that cannot be split into ``num_waves`` microbatches per device.
    """
    parallel = even_split(problem, num_waves)
    whole = replace(
        parallel,
        replicas=tuple(replace(r, microbatches=(r.num_samples,)) for r in parallel.replicas),
    )
    budget_bytes = budget_bytes or int(problem.memory_bytes[workers(problem)].min())
    return WaveFit(
        problem=problem,
        budget_bytes=budget_bytes,
        plain=simulated(problem, whole),
        accumulated=simulated(problem, parallel),
        tried=_search(problem, parallel, budget_bytes, changes),
    )


def even_split(problem: Problem, num_waves: int) -> Parallel:
    """Split the batch evenly into ``num_waves`` microbatches on each device."""
    other, names = problem.graph.other_batch, problem.cluster.device_names
    devices = workers(problem).tolist()
    if other is None:
        raise UsageError(
            f"{problem.graph.name} does not say what grows with its batch, so there are no waves",
            hint="give a model instead of a graph file, with a batch of two or more",
        )
    if num_waves < NUM_STREAMS:
        raise UsageError(
            f"waves run concurrently, and {num_waves} was given", hint="give 2 or more waves"
        )
    if not (problem.graph.op_phase == Phase.BACKWARD).any():
        raise UsageError("waves are of a training step", hint="plan it with an optimizer")
    parts = len(devices) * num_waves
    if other.num_samples < parts:
        raise UsageError(
            f"{other.num_samples} samples are fewer than {num_waves} waves on "
            f"{len(devices)} devices take",
            hint=f"give a batch of {parts} or more",
        )
    sizes = even_parts(other.num_samples, parts)
    return Parallel(
        replicas=tuple(
            Replica(
                devices=(names[device],),
                microbatches=sizes[i * num_waves : (i + 1) * num_waves],
            )
            for i, device in enumerate(devices)
        )
    )


def _search(
    problem: Problem, parallel: Parallel, budget_bytes: int, changes: Changes
) -> tuple[WaveCandidate, ...]:
    """Simulate starts all over the first wave, then around the best; sorted by start."""
    wave = priced_at(problem, parallel.replicas[0].microbatches[0])
    order = pass_order(wave.graph)
    row = int(problem.costs.device_row[workers(problem)[0]])
    passed_s = np.cumsum(wave.costs.op_s[row, order])
    tried: dict[int, WaveCandidate] = {}

    def attempt(parts: Iterable[float]) -> None:
        for part in parts:
            lead = int(np.searchsorted(passed_s, part * passed_s[-1], "left")) + 1 if part else 0
            lead = min(lead, len(order))
            if lead not in tried:
                tried[lead] = simulated(problem, parallel, Waves(lead=lead, changes=changes))

    def shortest(lead: int) -> tuple[float, ...]:
        found = tried[lead]
        # Bytes beyond the budget come first, so an infeasible start never beats a feasible one.
        return max(found.peak_bytes - budget_bytes, 0), found.step_s, found.peak_bytes

    def smallest(lead: int) -> tuple[float, ...]:
        return tried[lead].peak_bytes, tried[lead].step_s

    attempt(np.linspace(0.0, 1.0, _FIRST_TRIES))
    objectives: tuple[Callable[[int], tuple[float, ...]], ...] = (shortest, smallest)
    # The second search finds the smallest memory, for the message if nothing fits.
    for objective in objectives:
        step = 1.0 / (_FIRST_TRIES - 1)
        for _ in range(_FINER):
            step /= 2
            lead = min(tried, key=objective)
            middle = float(passed_s[lead - 1] / passed_s[-1]) if lead else 0.0
            attempt(np.clip([middle - step, middle + step], 0.0, 1.0))
    return tuple(tried[lead] for lead in sorted(tried))


# ── why ──────────────────────────────────────────────────────────────────────────────────────────


def exchange_share(candidate: WaveCandidate) -> float:
    """Fraction of the step in which the busiest device exchanges gradients and computes nothing."""
    timeline = candidate.timeline
    sends = timeline.op_stream == Stream.COMMUNICATION
    if not sends.any():
        return 0.0
    # The part of the step in which the busiest device is idle limits the exposed exchange.
    alone_s = timeline.makespan_s - timeline.busy_s.max()
    length_s = np.where(sends, timeline.op_end_s - timeline.op_start_s, 0.0)
    on_device = np.bincount(timeline.op_device, length_s, timeline.num_devices)
    return float(min(alone_s, on_device.max()) / timeline.makespan_s)


def reasons(fit: WaveFit) -> list[str]:
    """Explain the result in sentences without a final period."""
    shown = fit.shown
    assert shown.waves is not None
    num_waves = len(shown.parallel.replicas[0].microbatches)
    device, host = busy_shares(fit.problem, shown.parallel.replicas[0].microbatches[0])
    found = []
    if device >= FULL:
        already = "for" if fit.pays else "already:"
        found.append(
            f"kernels fill the device {already} {format_percent(device)} of a wave that runs alone"
        )
    elif host >= FULL:
        found.append(
            "one process issues the ops of both streams, and issuing those of one takes "
            f"{format_percent(host)} of its time"
        )
    else:
        found.append(
            f"a wave that runs alone uses {format_percent(device)} of the device and "
            f"{format_percent(host)} of the host"
        )
    if fit.plain is fit.best_alone and not fit.pays and not fit.is_equal:
        found.append("all samples at once fit, and larger kernels gain more than a second stream")
    if (sent := exchange_share(shown)) > _MUCH:
        found.append(
            f"gradients are exchanged for {format_percent(sent)} of the step without overlap"
        )
    if shown.waves.separate_bytes:
        found.append(
            f"captured streams have separate memory, {format_bytes(shown.waves.separate_bytes)} "
            "more than both hold at once"
        )
    elif fit.chosen is not None and fit.aligned.peak_bytes > fit.budget_bytes:
        found.append(
            "the second wave begins later than would be fastest, so that both fit into "
            f"{format_bytes(fit.budget_bytes)}"
        )
    if shown.waits_s > _MUCH * shown.timeline.makespan_s:
        found.append(
            f"streams wait for each other {shown.num_waits} times for results, about "
            f"{format_seconds(shown.waits_s)} of a step"
        )
    if shown.waves.changes == "wave":
        found.append(
            "parameters change after every wave, by the mean of its gradients and those of the "
            "wave before: a wave is computed with parameters that are one update old, each stream "
            f"holds a copy, and a step has {num_waves} updates instead of one; results are not "
            "those of accumulation"
        )
    return found
