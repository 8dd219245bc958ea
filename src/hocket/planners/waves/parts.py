"""Memory that one lane hands to the other in few large parts, each of them as a whole.

A wave drops last what it made first. So what its forward pass keeps for the backward pass fills one
part after the other, all of one size, and they become free from the last to the first. The wave
behind takes them in that order; it waits once for each, for the last op that used anything in it,
and the wave after that takes them in the first order again. An op that needs more scratch memory
than is left takes the next part, and smaller ones fill the rest. What is kept of the beginning of a
wave lies in memory of the lane's own, and so does all that is dropped soon, whatever lives to the
end of a wave, and the backward pass. Where backward passes need much scratch memory they go to the
part that they have just done with (``late``), which is handed over one part later then; that of the
last wave of two always does. The more lanes have of their own, the more they overlap: how much of
it fits beside so many parts is found by bisection. O(log shares · ops).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections import LaneWait
from hocket.plan.sections.lanes import NUM_LANES
from hocket.planners.waves.waits_for_room import WaveLives, wave_lives
from hocket.simulate.shares.lanes import pass_order

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
