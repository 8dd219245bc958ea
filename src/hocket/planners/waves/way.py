"""Ways to take the samples of a step, simulated, and the memory that two lanes are given.

Lanes of a graph that is replayed are given memory that is reserved: one for both, or one of each
lane's own, or that and parts which lanes hand over (`parts`). It takes somewhat more than what
lives at once, and that is held besides. In one memory a lane waits where it takes over what the
other had, in parts once for each; that costs time (`WAIT_S`), while memory of each lane's own costs
bytes. All are made of the ways that may be the best, and the best one within the budget is taken.
O(ways · (simulation + packing)).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes, LaneWait, Shares
from hocket.plan.sections.lanes import NUM_LANES
from hocket.planners.candidates import empty_plan
from hocket.planners.waves.parts import hand_overs, needed_bytes, parted, places_within
from hocket.planners.waves.slab import own_slabs, slab_of
from hocket.planners.waves.waiting import num_waits
from hocket.planners.waves.waits_for_room import held_bytes
from hocket.simulate.engine import simulate_shares
from hocket.simulate.shares import Unfolded, priced_at
from hocket.simulate.shares.lane_blocks import LaneBlocks, lane_blocks
from hocket.simulate.shares.lanes import pass_order
from hocket.simulate.timeline import Timeline

PLANNER = "waves"
WAIT_S = 8e-6
"""What a wait of one lane for the other costs in a replayed graph, which the simulator does not
count: ResNet-56 with 32 samples took 7,067 us with 315 waits and 4,703 with 20 on an H200."""
_EQUAL = 1.01
"""Of ways whose times differ by less, the one that holds least is taken."""
_NUM_PLACED = 4
"""Forms that fit and are compared, the quickest first: packing takes longer than a simulation."""
_NUM_PARTS = (2, 3, 4, 6, 8)
"""Into how many parts memory that lanes hand over is cut: few waits, or little that lies idle."""
_LEADS = (64, 16)
"""How far the second lane is behind, as a share of a wave's ops: lanes that are side by side wait
for each other's statistics at every op."""
_NUM_ROOMS = 4
"""How often parts are packed, with less room each time: that takes more than what lives at once."""


class PartsForm(NamedTuple):
    """How memory that lanes hand over is cut."""

    num_parts: int
    late: bool
    """Whether backward passes go to parts that they have done with."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WaveWay:
    """One way to take the samples of a step, and what the simulator thinks of it."""

    shares: Shares
    lanes: Lanes | None
    unfolded: Unfolded
    timeline: Timeline
    num_waits: int = 0
    """Of one lane for the other, where a graph is replayed."""

    @property
    def simulated_s(self) -> float:
        """Seconds of one step in the simulator, which does not count waits."""
        return self.timeline.makespan_s

    @property
    def waits_s(self) -> float:
        """What waits add to that."""
        return WAIT_S * self.num_waits

    @property
    def step_s(self) -> float:
        """Seconds of one step with its waits."""
        return self.simulated_s + self.waits_s

    @property
    def samples_per_s(self) -> float:
        """Samples of all replicas."""
        return self.shares.num_samples / self.step_s

    @property
    def peak_bytes(self) -> int:
        """Of the fullest device."""
        return int(self.timeline.peak_bytes.max())


def simulated(problem: Problem, shares: Shares, lanes: Lanes | None = None) -> WaveWay:
    """A way and its timeline."""
    unfolded, timeline = simulate_shares(problem, shares, None, lanes)
    return WaveWay(shares=shares, lanes=lanes, unfolded=unfolded, timeline=timeline)


def is_replayed(problem: Problem, lanes: Lanes | None = None) -> bool:
    """Whether ops follow each other in a graph that was captured."""
    changes_once = lanes is None or lanes.changes == "step"
    return changes_once and problem.costs.settings.get("launches") == "replayed"


def with_waits(problem: Problem, way: WaveWay, for_memory: Iterable[LaneWait] = ()) -> WaveWay:
    """The same with the waits that are counted: for results, and for memory where that is known."""
    if way.lanes is None or not is_replayed(problem, way.lanes):
        return way
    waits = num_waits(problem.graph, way.unfolded.passes[0], way.timeline, for_memory)
    return replace(way, num_waits=waits)


def placed(problem: Problem, way: WaveWay, *, apart: bool = False) -> WaveWay:
    """The same with addresses and waits, in one memory or, ``apart``, in one of each lane's own;
    beside that are the parts that the way has."""
    assert way.lanes is not None
    blocks, places = blocks_of(problem, way), way.lanes.places
    apart = apart or bool(places)
    slab = own_slabs(blocks, places) if apart else slab_of(blocks)
    # What is asked for call by call is not given reserved memory.
    lived_bytes = blocks.peak_bytes() if is_replayed(problem, way.lanes) else 0
    lanes = replace(
        way.lanes,
        waits=tuple(sorted({*way.lanes.waits, *slab.waits})),
        slab_bytes=0 if apart else sum(slab.sizes),
        own_bytes=slab.sizes[:NUM_LANES] if apart else (),
        part_bytes=slab.sizes[NUM_LANES:],
        lived_bytes=lived_bytes,
    )
    found = simulated(problem, way.shares, lanes)
    return replace(found, num_waits=with_waits(problem, way, slab.waits).num_waits)


def best_within(problem: Problem, ways: Iterable[WaveWay], most_bytes: int) -> WaveWay | None:
    """The quickest two lanes that hold at most so much, with their memory; None where none do.

    What they wait for results is counted (`with_waits`); waits for memory are counted here.
    """
    fitting = [way for way in ways if way.lanes is not None and way.peak_bytes <= most_bytes]
    if not fitting or not is_replayed(problem, fitting[0].lanes):
        return min(fitting, key=lambda way: (way.step_s, way.peak_bytes), default=None)
    found: list[WaveWay] = []
    for way in sorted(fitting, key=lambda way: (way.step_s, way.peak_bytes)):
        blocks = blocks_of(problem, way)
        apart_bytes = sum(map(blocks.peak_bytes, range(NUM_LANES))) - blocks.peak_bytes()
        can_part = way.peak_bytes + apart_bytes <= most_bytes
        forms = (placed(problem, way, apart=apart) for apart in (True, False)[not can_part :])
        found += [form for form in forms if form.peak_bytes <= most_bytes]
        if len(found) >= _NUM_PLACED:
            break
    if not any(way.lanes and way.lanes.own_bytes for way in found):
        found += islice(handed_over(problem, fitting[0].shares, most_bytes), 1)
    least_s = min((way.step_s for way in found), default=0.0)
    equal = [way for way in found if way.step_s <= _EQUAL * least_s]
    return min(equal, key=lambda way: (way.peak_bytes, way.step_s), default=None)


def handed_over(problem: Problem, shares: Shares, most_bytes: int) -> Iterator[WaveWay]:
    """Waves that hand over parts of memory and hold at most so much, for several numbers of parts,
    the quickest first."""
    sizes = shares.replicas[0].microbatches
    wave = priced_at(problem, max(sizes)).graph
    alone = simulated(problem, shares)
    room_bytes = most_bytes - alone.peak_bytes + int(held_bytes(wave).max(initial=0))
    leads = [len(pass_order(wave)) // share for share in _LEADS]

    def begun(form: PartsForm, room_bytes: int, leads: Iterable[int]) -> WaveWay | None:
        places = places_within(wave, len(sizes), form.num_parts, room_bytes, late=form.late)
        if places is None:
            return None
        waits = hand_overs(wave, places, len(sizes))
        in_parts = Lanes(lead=0, waits=waits, places=tuple(map(tuple, places.tolist())))
        ways = (simulated(problem, shares, replace(in_parts, lead=lead)) for lead in leads)
        return min((with_waits(problem, way, waits) for way in ways), key=lambda way: way.step_s)

    forms = [PartsForm(number, late) for number in _NUM_PARTS for late in (False, True)]
    tried = [(form, begun(form, room_bytes, leads)) for form in forms]
    found = [(form, way) for form, way in tried if way is not None]
    for form, start in sorted(found, key=lambda each: each[1].step_s):
        way, room = placed(problem, start), room_bytes
        for _ in range(_NUM_ROOMS):
            if way.peak_bytes <= most_bytes:
                yield way
                break
            assert way.lanes is not None
            # The search goes in steps, so the room may be larger than what it found.
            needed = needed_bytes(parted(wave), np.array(way.lanes.places))
            room = min(room, needed) - (way.peak_bytes - most_bytes)
            again = begun(form, room, [way.lanes.lead])
            if again is None:
                break
            way = placed(problem, again)


def blocks_of(problem: Problem, way: WaveWay) -> LaneBlocks:
    """What the lanes of the first device hold over time."""
    return lane_blocks(problem.graph, way.unfolded, way.timeline)


def plan_of(problem: Problem, way: WaveWay) -> Plan:
    """The plan of a way with lanes, with its addresses and waits."""
    assert way.lanes is not None
    way = way if any(way.lanes.slabs) else placed(problem, way)
    assert way.lanes is not None
    plan = empty_plan(problem, PLANNER).having(way.shares, way.lanes)
    return plan.claiming(step_s=way.step_s, peak_bytes=tuple(way.timeline.peak_bytes.tolist()))
