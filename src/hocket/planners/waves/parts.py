"""Memory that one lane hands to the other in few large parts, each of them as a whole.

A wave drops last what it made first. So its forward pass is cut into ranges that keep equally many
bytes for the backward pass, and what a range keeps lies in a part of its own: the parts become free
one after the other, from the last to the first. The wave behind takes them in that order, its first
range the part that is free first; it waits once for each, for the last op that used anything in it,
and the wave after that takes them in the first order again. What is kept of the beginning of a wave
lies in memory of the lane's own, and so does all that is dropped soon, whatever lives to the end of
a wave, and the backward pass: lanes that hold more of their own overlap more. How much of that fits
beside so many parts is found by bisection. O(log bytes · blocks), numpy.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections import LaneWait
from hocket.planners.waves.room import WaveLives, wave_lives
from hocket.simulate.shares.lanes import pass_order

_STEPS = 64
"""In how many steps the share that is of each lane's own is looked for."""


def parts_within(graph: Graph, num_parts: int, room_bytes: int) -> LongArray | None:
    """The part that each op of a wave takes, with most in memory of each lane's own; None where two
    lanes take more than the room with the least of that, too."""
    lives = wave_lives(graph)
    least, most = -1, _STEPS
    while most - least > 1:
        middle = (least + most) // 2
        found = parts_of(graph, lives, num_parts, middle / _STEPS)
        if _needed_bytes(graph, lives, found, num_parts) <= room_bytes:
            least = middle
        else:
            most = middle
    return None if least < 0 else parts_of(graph, lives, num_parts, least / _STEPS)


def parts_of(graph: Graph, lives: WaveLives, num_parts: int, own_share: float) -> LongArray:
    """The part that each op of a wave takes, from 1 on in the order of the wave; 0: the lane's own.

    ``own_share`` is that of the bytes kept for the backward pass which come before the first part.
    """
    order = pass_order(graph)
    num_forward = int((graph.op_phase[order] == Phase.FORWARD).sum())
    is_kept = (lives.made_at < num_forward) & (lives.used_at >= num_forward) & ~lives.is_output
    kept = np.bincount(lives.made_at[is_kept], lives.num_bytes[is_kept], len(order)).cumsum()
    bounds = kept[-1] * np.linspace(own_share, 1.0, num_parts, endpoint=False)
    ranges = np.searchsorted(bounds, kept, "left")
    used_at = np.full(len(order), -1)
    np.maximum.at(used_at, lives.made_at[is_kept], lives.used_at[is_kept])
    until_end = np.zeros(len(order), dtype=np.bool_)
    until_end[lives.made_at[lives.is_output]] = True
    part = np.where((used_at >= 0) & ~until_end, ranges, 0)
    for number in range(2, num_parts + 1):
        before = used_at[(ranges == number - 1) & (used_at >= 0)]
        # What is used after most of the range before is no longer would hold up all of its part.
        if len(before):
            part[(part == number) & (used_at > np.median(before))] = 0
    return part.astype(np.int64)


def hand_overs(graph: Graph, parts: LongArray, num_waves: int) -> tuple[LaneWait, ...]:
    """Each wave waits, where it begins with a part, for the last op that uses it in the wave
    before."""
    order, lives, num_parts = pass_order(graph), wave_lives(graph), int(parts.max(initial=0))
    last = np.full(num_parts + 1, -1)
    np.maximum.at(last, parts[lives.made_at], lives.used_at)
    numbers = range(1, num_parts + 1)
    first = {number: int(np.argmax(parts == number)) for number in numbers if number in parts}
    return tuple(
        LaneWait(wave, int(order[at]), wave - 1, int(order[last[num_parts + 1 - number]]))
        for wave in range(1, num_waves)
        for number, at in first.items()
        if last[num_parts + 1 - number] >= 0
    )


def _needed_bytes(graph: Graph, lives: WaveLives, parts: LongArray, num_parts: int) -> int:
    """What each lane holds of its own at most, and what the parts take: each for the larger of the
    two ranges that lie in it."""
    order = pass_order(graph)
    peaks = np.zeros(num_parts + 1, dtype=np.int64)
    for number in range(num_parts + 1):
        workspace = np.where(parts == number, graph.workspace_bytes[order], 0)
        held = lives.only(parts[lives.made_at] == number).held(len(order)) + workspace
        peaks[number] = held.max(initial=0)
    return int(2 * peaks[0] + np.maximum(peaks[1:], peaks[:0:-1]).sum())
