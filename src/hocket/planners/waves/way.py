"""Ways to take the samples of a step, simulated, and the memory that two lanes are given.

Lanes of a graph that is replayed are given memory that is reserved: one for both, or one of each
lane's own, or that and parts which lanes hand over (`parts`). It takes somewhat more than what
lives at once, and that is held besides. In one memory a lane waits where it takes over what the
other had, in parts once for each; that costs time (`WAIT_S`), while memory of each lane's own costs
bytes. All are made of the ways that may be the best, and the best one within the budget is taken.
O(ways · (simulation + packing)).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.graph import Graph, Phase
from hocket.hardware.allocation import aligned
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes, LaneWait, Parallel
from hocket.plan.sections.lanes import NUM_LANES
from hocket.planners.candidates import empty_plan
from hocket.planners.memory.packing import Intervals, pack
from hocket.planners.waves.waiting import num_waits
from hocket.planners.waves.waits_for_room import WaveLives, held_bytes, wave_lives
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.parallel import ExpandedStep, priced_at
from hocket.simulate.parallel.lane_blocks import LaneBlocks, lane_blocks
from hocket.simulate.parallel.lanes import pass_order
from hocket.simulate.timeline import Timeline

# Memory that one lane hands to the other in few large parts, each of them as a whole.
#
# A wave drops last what it made first. So what its forward pass keeps for the backward pass fills
# one part after the other, all of one size, and they become free from the last to the first. The
# wave behind takes them in that order; it waits once for each, for the last op that used anything
# in it, and the wave after that takes them in the first order again. An op that needs more scratch
# memory than is left takes the next part, and smaller ones fill the rest. What is kept of the
# beginning of a wave lies in memory of the lane's own, and so does all that is dropped soon,
# whatever lives to the end of a wave, and the backward pass. Where backward passes need much
# scratch memory they go to the part that they have just done with (``late``), which is handed over
# one part later then; that of the last wave of two always does. The more lanes have of their own,
# the more they overlap: how much of it fits beside so many parts is found by bisection. O(log
# shares · ops).

_STEPS = 64
"""In how many steps the share that is of each lane's own is looked for."""


class PartedWave(NamedTuple):
    """A wave as it is laid into parts: positions are those of its lane."""

    lives: WaveLives
    num_forward: int
    kept: LongArray
    """What each op of the forward pass makes that the backward pass uses."""
    beside: LongArray
    """What each op makes or takes beside that."""
    used_at: LongArray
    """The last op that uses what is kept; -1 where nothing is, or some of it to the end."""
    workspace: LongArray


def parted(graph: Graph) -> PartedWave:
    """What of a wave could lie in parts."""
    order, lives = pass_order(graph), wave_lives(graph)
    num_forward = int((graph.op_phase[order] == Phase.FORWARD).sum())
    is_kept = (lives.made_at < num_forward) & (lives.used_at >= num_forward) & ~lives.is_output
    workspace = graph.workspace_bytes[order]
    kept, beside = np.zeros(len(order), dtype=np.int64), workspace.copy()
    np.add.at(kept, lives.made_at[is_kept], lives.num_bytes[is_kept])
    np.add.at(beside, lives.made_at[~is_kept], lives.num_bytes[~is_kept])
    used_at = np.full(len(order), -1, dtype=np.int64)
    np.maximum.at(used_at, lives.made_at[is_kept], lives.used_at[is_kept])
    used_at[lives.made_at[lives.is_output]] = -1
    return PartedWave(lives, num_forward, kept, beside, used_at, workspace)


def places_within(
    graph: Graph, num_waves: int, num_parts: int, room_bytes: int, *, late: bool = False
) -> LongArray | None:
    """Slabs of all ops ([lane, position]), with most in memory of each lane's own; None where lanes
    take more than the room with the least of that, too."""
    wave = parted(graph)
    least, most = -1, _STEPS
    while most - least > 1:
        middle = (least + most) // 2
        found = places_of(wave, num_waves, num_parts, middle / _STEPS, late=late)
        if needed_bytes(wave, found) <= room_bytes:
            least = middle
        else:
            most = middle
    if least < 0:
        return None
    return places_of(wave, num_waves, num_parts, least / _STEPS, late=late)


def places_of(
    wave: PartedWave, num_waves: int, num_parts: int, own_share: float, *, late: bool = False
) -> LongArray:
    """The slab in which lies what each op makes: a lane's own, or behind these a part.

    ``own_share`` is that of the bytes kept for the backward pass which come before the first part.
    """
    total = int(wave.kept.sum())
    own_bytes = int(own_share * total)
    part_bytes = -(-(total - own_bytes) // num_parts)
    part = _filled(wave, num_parts, own_bytes, part_bytes)
    lanes = np.stack((part, part))
    if late:
        _go_back(wave, lanes[0], part_bytes)
    if late or num_waves == NUM_LANES:
        _go_back(wave, lanes[1], part_bytes)
    in_order = np.arange(num_parts) + NUM_LANES
    slabs = np.stack((np.append(0, in_order), np.append(1, in_order[::-1])))
    return np.stack([slabs[lane][lanes[lane]] for lane in range(NUM_LANES)])


def _filled(wave: PartedWave, num_parts: int, own_bytes: int, part_bytes: int) -> LongArray:
    """The part that each op takes, from 1 on; 0: the lane's own."""
    found = np.zeros(len(wave.kept), dtype=np.int64)
    held = [0] * (num_parts + 1)
    users: list[list[int]] = [[] for _ in held]
    now = 0
    for op in np.flatnonzero((wave.kept > 0) & (wave.used_at >= 0)).tolist():
        kept, asked = int(wave.kept[op]), int(wave.kept[op] + wave.beside[op])
        while now < num_parts and held[now] + kept > (part_bytes if now else own_bytes):
            now += 1
        for part in range(now, min(now + 2, num_parts + 1)):
            # What is used after most of the part before is free would hold up all of its own.
            is_late = part > 0 and users[part - 1] and wave.used_at[op] > np.median(users[part - 1])
            if is_late or (part and held[part] + asked > part_bytes):
                continue
            found[op] = part
            held[part] += kept
            users[part].append(int(wave.used_at[op]))
            break
    return found


def _go_back(wave: PartedWave, part: LongArray, part_bytes: int) -> None:
    """Lay the backward pass into the part that was free last, where what it needs fits."""
    lives = wave.lives
    is_kept = part[lives.made_at] > 0
    free_from = np.zeros(int(part.max(initial=0)) + 1, dtype=np.int64)
    np.maximum.at(free_from, part[lives.made_at[is_kept]], lives.used_at[is_kept] + 1)
    held = np.zeros((len(free_from), len(part)), dtype=np.int64)
    made: dict[int, list[int]] = {}
    for block in np.flatnonzero(lives.made_at >= wave.num_forward).tolist():
        made.setdefault(int(lives.made_at[block]), []).append(block)
    for op in range(wave.num_forward, len(part)):
        free = np.flatnonzero((free_from > 0) & (free_from <= op))
        blocks = made.get(op, [])
        if not len(free) or any(lives.is_output[blocks]):
            continue
        last = int(free[np.argmax(free_from[free])])
        asked = held[last, op:].copy()
        for block in blocks:
            asked[: lives.used_at[block] + 1 - op] += lives.num_bytes[block]
        if asked.max() + wave.workspace[op] <= part_bytes:
            part[op], held[last, op:] = last, asked


def needed_bytes(wave: PartedWave, places: LongArray) -> int:
    """What all slabs take, each as much as the lane that holds most in it."""
    num_ops, most = places.shape[1], 0
    for slab in range(int(places.max()) + 1):
        peaks = [0]
        for row in places:
            held = wave.lives.only(row[wave.lives.made_at] == slab).held(num_ops)
            peaks.append(int((held + np.where(row == slab, wave.workspace, 0)).max(initial=0)))
        most += max(peaks)
    return most


def hand_overs(graph: Graph, places: LongArray, num_waves: int) -> tuple[LaneWait, ...]:
    """Each wave waits, where it begins with a part, for the last op that uses it in the wave
    before."""
    order, lives = pass_order(graph), wave_lives(graph)
    last = np.full((NUM_LANES, int(places.max()) + 1), -1)
    for lane in range(NUM_LANES):
        np.maximum.at(last[lane], places[lane][lives.made_at], lives.used_at)
    found = []
    for wave in range(1, num_waves):
        lane = wave % NUM_LANES
        for slab in range(NUM_LANES, last.shape[1]):
            takes, until = np.flatnonzero(places[lane] == slab), int(last[1 - lane, slab])
            if len(takes) and until >= 0:
                found.append(LaneWait(wave, int(order[takes[0]]), wave - 1, int(order[until])))
    return tuple(sorted(found))


# Addresses of all that two lanes hold, in one slab, safe however fast the lanes really are.
#
# Offline best fit (`hocket.planners.memory.packing`) gives addresses for the lives that the
# simulator saw. Inside a lane ops follow each other, so nothing is overwritten too early. Between
# lanes the plan makes sure of it: an op whose result lies where something of the other lane lay
# waits for the last op of that lane which used it. A lane passes its waits in order, so of several
# only the latest counts. Where memory is of each lane's own, it has a slab to itself, behind that
# of the lane before; then a lane waits for the other only where that used what it had made (a
# gradient, to add it). Parts that lanes hand over are slabs behind these: who takes anything there
# waits for all that lay in the part, and so once for each. O(packing + blocks²) numpy, row by row.

_SEGMENT_BYTES, _LARGE_BYTES = 2 << 20, 10 << 20
"""To what PyTorch's allocator rounds what it asks the driver for, from which size on."""
Places = Sequence[Sequence[int]]
"""Of each lane, for each op of a wave, the slab in which lies what it makes."""


class Slab(NamedTuple):
    """Where all blocks lie, and where lanes wait for each other so that it holds."""

    address: LongArray
    sizes: tuple[int, ...]
    """Bytes of the one slab, or of each lane's own and then of each part."""
    waits: tuple[LaneWait, ...]


def slab_of(blocks: LaneBlocks) -> Slab:
    """One slab for all lanes."""
    lives = _lives(blocks)
    found = pack(lives)
    waits = _waits(blocks, lives, found.address, found.address + lives.num_bytes)
    return Slab(found.address, (found.slab_bytes,), tuple(waits))


def own_slabs(blocks: LaneBlocks, places: Places = ()) -> Slab:
    """A slab for each lane, and one for each part that lanes hand over."""
    lives = _lives(blocks)
    number = blocks.slab_of(places)
    address = np.zeros(len(blocks.lane), dtype=np.int64)
    start, stop = address.copy(), address.copy()
    sizes: list[int] = []
    for slab in range(max((max(row) + 1 for row in places), default=NUM_LANES)):
        here = number == slab
        found = pack(Intervals(*(column[here] for column in lives)))
        start[here] = sum(sizes)
        address[here] = found.address + sum(sizes)
        sizes.append(_reserved_bytes(found.slab_bytes))
        stop[here] = sum(sizes)
    is_own = number < NUM_LANES
    start = np.where(is_own, address, start)
    stop = np.where(is_own, address + lives.num_bytes, stop)
    return Slab(address, tuple(sizes), tuple(_waits(blocks, lives, start, stop)))


def _reserved_bytes(num_bytes: int) -> int:
    """What PyTorch takes of the device for a piece of so much; of one slab it is little, of many a
    few per cent."""
    if num_bytes < _LARGE_BYTES:
        return num_bytes
    return -(-num_bytes // _SEGMENT_BYTES) * _SEGMENT_BYTES


def _lives(blocks: LaneBlocks) -> Intervals:
    """Instants in order; what ends at one of them makes room for what begins there."""
    instants = np.unique(np.concatenate((blocks.start_s, blocks.end_s)))
    start = 2 * np.searchsorted(instants, blocks.start_s) + 1
    end = np.maximum(2 * np.searchsorted(instants, blocks.end_s), start)
    return Intervals(aligned(blocks.num_bytes), start.astype(np.int64), end.astype(np.int64))


def _waits(
    blocks: LaneBlocks, lives: Intervals, start: LongArray, stop: LongArray
) -> list[LaneWait]:
    """Waits with which every block takes over what lay between two addresses."""
    found = []
    for lane in range(len(blocks.sequence)):
        other = 1 - lane
        latest = np.full(len(blocks.sequence[lane]), -1)
        for block in np.flatnonzero((blocks.lane == lane) & (blocks.made_at >= 0)).tolist():
            meets = (start < stop[block]) & (stop > start[block])
            before = meets & (lives.end < lives.start[block])
            at = blocks.made_at[block]
            latest[at] = max(latest[at], int(blocks.used_at[other][before].max(initial=-1)))
        found += _first_waits(blocks, lane, np.maximum.accumulate(latest))
    return sorted(found)


def _first_waits(blocks: LaneBlocks, lane: int, latest: LongArray) -> list[LaneWait]:
    """One wait for each op with which the lane begins to need more of the other one."""
    own, other = blocks.sequence[lane], blocks.sequence[1 - lane]
    grows = np.flatnonzero(np.diff(latest, prepend=-1) > 0)
    return [LaneWait(*own[at], *other[latest[at]]) for at in grows]


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
    """True if backward passes go to parts that they have done with."""


@dataclass(frozen=True, eq=False, kw_only=True)
class WaveWay:
    """One way to take the samples of a step, and what the simulator thinks of it."""

    shares: Parallel
    lanes: Lanes | None
    unfolded: ExpandedStep
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


def simulated(problem: Problem, shares: Parallel, lanes: Lanes | None = None) -> WaveWay:
    """A way and its timeline."""
    unfolded, timeline = simulate_parallel(problem, shares, None, lanes)
    return WaveWay(shares=shares, lanes=lanes, unfolded=unfolded, timeline=timeline)


def is_replayed(problem: Problem, lanes: Lanes | None = None) -> bool:
    """True if ops follow each other in a graph that was captured."""
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


def handed_over(problem: Problem, shares: Parallel, most_bytes: int) -> Iterator[WaveWay]:
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
