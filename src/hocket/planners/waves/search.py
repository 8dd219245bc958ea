"""Find when the second wave begins: the shortest step whose two waves fit, by search.

Wavelet (Wang et al., MLSys 2021) starts the second wave half a cycle behind the first, so that its
memory grows while the first one's shrinks. How far behind is best depends on the model and on what
kernels leave free: the earlier, the more the lanes overlap; the later, the less they hold together.
So starts are tried over the whole of the first wave, evenly in its time, then ever finer around the
best; where memory is short, waves are also tried that begin at once and wait wherever both would
hold too much (`waits_for_room`). Every one is simulated as a whole, and the plan is the shortest
that keeps the budget, by its time and by what its waits cost (`way`): lanes that are some ops apart
wait for each other less often, and those with memory of their own for results alone. Beside it
stands what people do without lanes. O(tries) simulations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hocket.base.errors import NoFeasiblePlanError, UsageError
from hocket.base.parts import even_parts
from hocket.base.units import format_bytes, typed_bytes
from hocket.graph.graph import Phase
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes, Parallel, Replica
from hocket.plan.sections.lanes import NUM_LANES, Changes
from hocket.planners.placement.devices import workers
from hocket.planners.waves.waits_for_room import held_bytes, room_waits
from hocket.planners.waves.way import (
    WaveWay,
    best_within,
    blocks_of,
    placed,
    plan_of,
    simulated,
    with_waits,
)
from hocket.simulate.parallel import priced_at
from hocket.simulate.parallel.lane_blocks import LaneBlocks
from hocket.simulate.parallel.lanes import pass_order

_FIRST_TRIES = 17
"""Starts over the whole of the first wave, its two ends among them."""
LEAN = 1.25
"""Times what one wave holds: what two hold at most where they are to be lean. Half a period apart
they hold as much where a backward pass takes twice as long as a forward pass."""
CLOSE = 1.12
"""A gain below this is not more than predictions were off: of ResNet-56 with 256 samples, the one
workload where lanes paid on an H200, it was 12 % too high, 14, 4 and 6 % too low and right in
five runs (`benchmarks/results/2026-11-17-waves-h200.md` and ``-earlier.md``)."""
_NUM_TRIED = 8
"""Budgets that are tried for the least that two waves can do with."""
EQUAL = 0.005
"""Ways whose samples per second differ by a smaller share are called equal."""
_NUM_ROOMS, _LESS_ROOM = 4, 0.015
"""How often waves get less room, and by what share: packing takes 0.1 to 2.6 % more than lives at
once."""
_FINER = 3
"""How often the distance between tries is halved around the best."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WaveFit:
    """What tick-tock gains over the ways without lanes, and its plan."""

    problem: Problem
    budget_bytes: int
    plain: WaveWay
    """All samples at once."""
    accumulated: WaveWay
    """The same microbatches one after the other."""
    aligned: WaveWay
    """Two waves that begin together."""
    tried: tuple[WaveWay, ...]
    """Waves with every start that was simulated, by start."""

    @cached_property
    def leanest(self) -> WaveWay:
        """The start with which two waves that overlap at all hold least."""
        return min(self._overlapping, key=lambda way: (way.peak_bytes, way.simulated_s))

    @cached_property
    def least_bytes(self) -> int:
        """Little that two waves can do with, with the memory that they are given: packing takes
        more than what lives, how much more is found by trying."""
        lived_bytes = self.leanest.peak_bytes
        most_bytes = placed(self.problem, self.leanest).peak_bytes
        for part in range(_NUM_TRIED):
            budget = lived_bytes + part * (most_bytes - lived_bytes) // _NUM_TRIED
            if (way := best_within(self.problem, self._overlapping, budget)) is not None:
                return way.peak_bytes
        return most_bytes

    @cached_property
    def chosen(self) -> WaveWay | None:
        """The quickest within the budget, with its memory; None where no two waves fit."""
        return best_within(self.problem, self._overlapping, self.budget_bytes)

    @cached_property
    def lean(self) -> WaveWay | None:
        """The quickest that holds at most `LEAN` times one wave; None where none does."""
        most_bytes = round(LEAN * self.one_wave_bytes)
        if self.budget_bytes <= most_bytes:
            return self.chosen
        if self.chosen is not None and self.chosen.peak_bytes <= most_bytes:
            return self.chosen
        return best_within(self.problem, self._overlapping, most_bytes)

    @property
    def _overlapping(self) -> list[WaveWay]:
        whole = len(pass_order(self.problem.graph))
        return [way for way in self.tried if way.lanes is not None and way.lanes.lead < whole]

    @property
    def best_alone(self) -> WaveWay | None:
        """The best within the budget without lanes."""
        alone = (self.plain, self.accumulated)
        fitting = [way for way in alone if way.peak_bytes <= self.budget_bytes]
        return min(fitting, key=lambda way: way.step_s, default=None)

    @property
    def gain(self) -> float | None:
        """Samples per second of the chosen waves over the best without lanes; None without them."""
        if self.chosen is None or self.best_alone is None:
            return None
        return self.chosen.samples_per_s / self.best_alone.samples_per_s

    @property
    def pays(self) -> bool:
        """True if the waves are quicker, or the only way that fits."""
        return self.chosen is not None and (self.gain is None or self.gain >= 1 + EQUAL)

    @property
    def is_equal(self) -> bool:
        """True if the waves are neither quicker nor slower."""
        return self.gain is not None and abs(self.gain - 1) < EQUAL

    @property
    def is_close(self) -> bool:
        """True if what the waves gain is less than predictions of it were off on a GPU."""
        return self.gain is not None and self.pays and self.gain < CLOSE

    def blocks(self, way: WaveWay) -> LaneBlocks:
        """What the lanes of the first device hold over time."""
        return blocks_of(self.problem, way)

    @property
    def one_wave_bytes(self) -> int:
        """What the step holds at most while it takes one microbatch after the other."""
        return self.accumulated.peak_bytes

    def plan(self) -> Plan:
        """The plan of the chosen waves; raises `NoFeasiblePlanError` where none fit."""
        way = self.chosen
        if way is None:
            raise NoFeasiblePlanError(
                f"two waves of {self.problem.graph.name} do not fit into "
                f"{format_bytes(self.budget_bytes)}: the leanest need "
                f"{format_bytes(self.least_bytes)}",
                hint=f"give them {typed_bytes(self.least_bytes)}, or make the batch smaller",
            )
        return self.plan_of(way)

    def plan_of(self, way: WaveWay) -> Plan:
        """The plan of a way with lanes, with its addresses and waits."""
        return plan_of(self.problem, way)


def fit_waves(
    problem: Problem,
    *,
    num_waves: int = NUM_LANES,
    budget_bytes: int | None = None,
    changes: Changes = "step",
    lean: bool = False,
) -> WaveFit:
    """Search the start of the second wave; every device takes an equal share of the batch.

    ``budget_bytes`` are those of each device, by default what it has, and where waves are to be
    ``lean`` no more than `LEAN` times what one wave holds; ``changes`` says after what parameters
    change. Raises `UsageError` for a batch that cannot be shared out so.
    """
    shares = even_shares(problem, num_waves)
    if changes == "wave" and len(shares.replicas) > 1:
        raise UsageError(
            "parameters that change after every wave are for one device",
            hint="have waves of several devices change them once per step",
        )
    whole = replace(
        shares,
        replicas=tuple(replace(r, microbatches=(r.num_samples,)) for r in shares.replicas),
    )
    budget_bytes = budget_bytes or int(problem.memory_bytes[workers(problem)].min())
    accumulated = simulated(problem, shares)
    little = round(LEAN * accumulated.peak_bytes)
    if lean:
        budget_bytes = min(budget_bytes, little)
    tried = _search(problem, shares, budget_bytes, changes)
    aligned = tried[0]
    for most in sorted({budget_bytes, little}):
        if most < aligned.peak_bytes:
            tried += within(problem, accumulated, most, changes)
    return WaveFit(
        problem=problem,
        budget_bytes=budget_bytes,
        plain=simulated(problem, whole),
        accumulated=accumulated,
        aligned=aligned,
        tried=tuple(tried),
    )


def even_shares(problem: Problem, num_waves: int) -> Parallel:
    """The batch in so many microbatches on each device."""
    other, names = problem.graph.other_batch, problem.cluster.device_names
    devices = workers(problem).tolist()
    if other is None:
        raise UsageError(
            f"{problem.graph.name} does not say what grows with its batch, so there are no waves",
            hint="give a model instead of a graph file, with a batch of two or more",
        )
    if num_waves < NUM_LANES:
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


def within(
    problem: Problem, one: WaveWay, most_bytes: int, changes: Changes = "step"
) -> list[WaveWay]:
    """Waves that wait where both would hold more than so much; none where one alone does.

    They come with ever less room: what is reserved for them is more than lives there at once.
    """
    replica = one.shares.replicas[0]
    wave = priced_at(problem, max(replica.microbatches)).graph
    beside = one.peak_bytes - int(held_bytes(wave).max())
    found: list[WaveWay] = []
    room = most_bytes - beside
    for _ in range(_NUM_ROOMS):
        waits = room_waits(wave, len(replica.microbatches), room)
        if waits is None:
            break
        way = simulated(problem, one.shares, Lanes(lead=0, waits=waits, changes=changes))
        found += [with_waits(problem, way)] * (way.peak_bytes <= most_bytes)
        room -= max(way.peak_bytes - most_bytes, round(_LESS_ROOM * room))
    return found


def _search(
    problem: Problem, shares: Parallel, budget_bytes: int, changes: Changes
) -> list[WaveWay]:
    """Waves by their start: all over the first wave, then finer around the best."""
    wave = priced_at(problem, shares.replicas[0].microbatches[0])
    order = pass_order(wave.graph)
    row = int(problem.costs.device_row[workers(problem)[0]])
    passed_s = np.cumsum(wave.costs.op_s[row, order])
    tried: dict[int, WaveWay] = {}

    def attempt(shares_of_wave: Iterable[float]) -> None:
        for part in shares_of_wave:
            lead = int(np.searchsorted(passed_s, part * passed_s[-1], "left")) + 1 if part else 0
            lead = min(lead, len(order))
            if lead not in tried:
                way = simulated(problem, shares, Lanes(lead=lead, changes=changes))
                tried[lead] = with_waits(problem, way)

    def shortest(lead: int) -> tuple[float, ...]:
        way = tried[lead]
        return max(way.peak_bytes - budget_bytes, 0), way.simulated_s, way.peak_bytes

    def leanest(lead: int) -> tuple[float, ...]:
        return tried[lead].peak_bytes, tried[lead].simulated_s

    attempt(np.linspace(0.0, 1.0, _FIRST_TRIES))
    for wanted in (shortest, leanest):
        step = 1.0 / (_FIRST_TRIES - 1)
        for _ in range(_FINER):
            step /= 2
            lead = min(tried, key=wanted)
            middle = float(passed_s[lead - 1] / passed_s[-1]) if lead else 0.0
            attempt(np.clip([middle - step, middle + step], 0.0, 1.0))
    return [tried[lead] for lead in sorted(tried)]
