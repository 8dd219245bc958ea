"""Addresses of all that two lanes hold, in one slab, safe however fast the lanes really are.

Offline best fit (`hocket.planners.memory.packing`) gives addresses for the lives that the simulator
saw. Inside a lane ops follow each other, so nothing is overwritten too early. Between lanes the
plan makes sure of it: an op whose result lies where something of the other lane lay waits for the
last op of that lane which used it. A lane passes its waits in order, so of several only the latest
counts. Where memory is of each lane's own, it has a slab to itself, behind that of the lane before;
then a lane waits for the other only where that used what it had made (a gradient, to add it).
O(packing + blocks²) numpy, row by row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.plan.sections import LaneWait
from hocket.planners.memory.packing import ALIGNMENT_BYTES, Intervals, pack
from hocket.planners.waves.blocks import LaneBlocks


class Slab(NamedTuple):
    """Where all blocks lie, and where lanes wait for each other so that it holds."""

    address: LongArray
    sizes: tuple[int, ...]
    """Bytes of the one slab, or of each lane's own."""
    waits: tuple[LaneWait, ...]


def slab_of(blocks: LaneBlocks) -> Slab:
    """One slab for all lanes."""
    lives = _lives(blocks)
    found = pack(lives)
    waits = _waits(blocks, lives, found.address)
    return Slab(found.address, (found.slab_bytes,), tuple(waits))


def own_slabs(blocks: LaneBlocks) -> Slab:
    """A slab for each lane."""
    lives = _lives(blocks)
    address = np.zeros(len(blocks.lane), dtype=np.int64)
    sizes: list[int] = []
    for lane in range(len(blocks.sequence)):
        here = blocks.lane == lane
        found = pack(Intervals(*(column[here] for column in lives)))
        address[here] = found.address + sum(sizes)
        sizes.append(found.slab_bytes)
    return Slab(address, tuple(sizes), tuple(_waits(blocks, lives, address)))


def _lives(blocks: LaneBlocks) -> Intervals:
    """Instants in order; what ends at one of them makes room for what begins there."""
    instants = np.unique(np.concatenate((blocks.start_s, blocks.end_s)))
    start = 2 * np.searchsorted(instants, blocks.start_s) + 1
    end = np.maximum(2 * np.searchsorted(instants, blocks.end_s), start)
    rounded = -(-blocks.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return Intervals(rounded, start.astype(np.int64), end.astype(np.int64))


def _waits(blocks: LaneBlocks, lives: Intervals, address: LongArray) -> list[LaneWait]:
    found = []
    top = address + lives.num_bytes
    for lane in range(len(blocks.sequence)):
        other = 1 - lane
        latest = np.full(len(blocks.sequence[lane]), -1)
        for block in np.flatnonzero((blocks.lane == lane) & (blocks.made_at >= 0)).tolist():
            meets = (address < top[block]) & (top > address[block])
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
