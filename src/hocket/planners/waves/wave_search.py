"""Search for the start of the second wave: the shortest step whose two waves fit.

Wavelet (Wang et al., MLSys 2021) starts the second wave half a cycle behind the first, so that its
memory grows while that of the first shrinks. The best lead depends on the model and on what kernels
leave free: the earlier, the more the streams overlap; the later, the less they hold together (where
they share memory, see `wave_candidate`). So starts are tried over the whole of the first wave,
evenly in its time, then ever finer around the best, and each is simulated. The chosen one is
compared with the same samples without waves. O(tries) simulations.
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
from hocket.planners.placement.devices import workers
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
"""Starts over the whole of the first wave, its two ends among them."""
_FINER = 3
"""Halvings of the distance between tries around the best."""
CLOSE = 1.12
"""A gain below this is within the error of the predictions: of ResNet-56 with 256 samples, the one
workload where two streams paid on an H200, they were 12 % too high, 14, 4 and 6 % too low and right
in five runs (`benchmarks/results/2026-11-17-waves-h200.md` and ``-earlier.md``)."""
EQUAL = 0.005
"""Candidates whose samples per second differ by a smaller share are called equal."""
_MUCH = 0.1
"""A share of the step that is worth a sentence."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WaveFit:
    """Gain of tick-tock over the same samples without waves, and its plan."""

    problem: Problem
    budget_bytes: int
    plain: WaveCandidate
    """All samples at once."""
    accumulated: WaveCandidate
    """The microbatches one after the other."""
    tried: tuple[WaveCandidate, ...]
    """Waves with every start that was simulated, by start."""

    @property
    def aligned(self) -> WaveCandidate:
        """Two waves that begin together."""
        return self.tried[0]

    @cached_property
    def smallest(self) -> WaveCandidate:
        """The start with the least memory of two waves that overlap at all."""
        return min(self._overlapping, key=lambda each: (each.peak_bytes, each.step_s))

    @cached_property
    def chosen(self) -> WaveCandidate | None:
        """The fastest within the budget; None where no two waves fit."""
        return fastest_within(self._overlapping, self.budget_bytes)

    @property
    def shown(self) -> WaveCandidate:
        """The chosen start, or the smallest where none fits."""
        return self.chosen or self.smallest

    @property
    def _overlapping(self) -> list[WaveCandidate]:
        whole = len(pass_order(self.problem.graph))
        return [each for each in self.tried if each.waves is not None and each.waves.lead < whole]

    @property
    def best_alone(self) -> WaveCandidate | None:
        """The best within the budget without waves."""
        return fastest_within((self.plain, self.accumulated), self.budget_bytes)

    @property
    def gain(self) -> float | None:
        """Samples per second of the chosen waves over the best without; None without one."""
        if self.chosen is None or self.best_alone is None:
            return None
        return self.chosen.samples_per_s / self.best_alone.samples_per_s

    @property
    def pays(self) -> bool:
        """True if the waves are faster, or all that fits."""
        return self.chosen is not None and (self.gain is None or self.gain >= 1 + EQUAL)

    @property
    def is_equal(self) -> bool:
        """True if the waves are neither faster nor slower."""
        return self.gain is not None and abs(self.gain - 1) < EQUAL

    @property
    def is_close(self) -> bool:
        """True if the gain is within the error of the predictions on a GPU."""
        return self.gain is not None and self.pays and self.gain < CLOSE

    @property
    def one_wave_bytes(self) -> int:
        """Peak of a step that runs one microbatch after the other."""
        return self.accumulated.peak_bytes

    def plan(self) -> Plan:
        """The plan of the chosen waves; raises `NoFeasiblePlanError` where none fit."""
        if self.chosen is None:
            least = self.smallest.peak_bytes
            raise NoFeasiblePlanError(
                f"two waves of {self.problem.graph.name} do not fit into "
                f"{format_bytes(self.budget_bytes)}: they need {format_bytes(least)}",
                hint=f"give them {typed_bytes(least)}, or make the batch smaller",
            )
        return self.plan_of(self.chosen)

    def plan_of(self, candidate: WaveCandidate) -> Plan:
        """The plan of one of the starts."""
        return plan_of(self.problem, candidate)


def fit_waves(
    problem: Problem,
    *,
    num_waves: int = NUM_STREAMS,
    budget_bytes: int | None = None,
    changes: Changes = "step",
) -> WaveFit:
    """Search the start of the second wave; every device takes an equal part of the batch.

    ``budget_bytes`` are those of each device, by default all that it has; ``changes`` says when
    parameters change. Raises `UsageError` for a batch that cannot be split so.
    """
    parallel = even_split(problem, num_waves)
    if changes == "wave" and len(parallel.replicas) > 1:
        raise UsageError(
            "parameters that change after every wave are for one device",
            hint="have waves of several devices change them once per step",
        )
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
    """The batch in so many microbatches on each device."""
    other, names = problem.graph.other_batch, problem.cluster.device_names
    devices = workers(problem).tolist()
    if other is None:
        raise UsageError(
            f"{problem.graph.name} does not say what grows with its batch, so there are no waves",
            hint="give a model instead of a graph file, with a batch of two or more",
        )
    if num_waves < NUM_STREAMS:
        raise UsageError(f"{num_waves} wave has no other beside it", hint="give 2 or more")
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
    """Waves by their start: all over the first wave, then finer around the best."""
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
        return max(found.peak_bytes - budget_bytes, 0), found.step_s, found.peak_bytes

    def smallest(lead: int) -> tuple[float, ...]:
        return tried[lead].peak_bytes, tried[lead].step_s

    attempt(np.linspace(0.0, 1.0, _FIRST_TRIES))
    objectives: tuple[Callable[[int], tuple[float, ...]], ...] = (shortest, smallest)
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
    """Part of the step in which the busiest device exchanges gradients and computes nothing."""
    timeline = candidate.timeline
    sends = timeline.stream[: timeline.num_works] == Stream.COMMUNICATION
    if not sends.any():
        return 0.0
    alone_s = timeline.makespan_s - timeline.busy_s.max()
    length_s = np.where(sends, timeline.op_end_s - timeline.op_start_s, 0.0)
    on_device = np.bincount(timeline.op_device, length_s, timeline.num_devices)
    return float(min(alone_s, on_device.max()) / timeline.makespan_s)


def reasons(fit: WaveFit) -> list[str]:
    """Sentences without a period that explain the result."""
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
