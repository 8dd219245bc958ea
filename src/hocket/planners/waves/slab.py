"""Addresses of all that two lanes hold, in one slab, safe however fast the lanes really are.

Offline best fit (`hocket.planners.memory.packing`) gives addresses for the lives that the simulator
saw. Inside a lane ops follow each other, so nothing is overwritten too early. Between lanes the
plan makes sure of it: an op whose result lies where something of the other lane lay waits for the
last op of that lane which used it. A lane passes its waits in order, so of several only the latest
counts. Where memory is of each lane's own, it has a slab to itself, behind that of the lane before;
then a lane waits for the other only where that used what it had made (a gradient, to add it). Parts
that lanes hand over are slabs behind these: who takes anything there waits for all that lay in the
part, and so once for each. O(packing + blocks²) numpy, row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.hardware.allocation import aligned
from hocket.plan.sections import LaneWait
from hocket.plan.sections.lanes import NUM_LANES
from hocket.planners.memory.packing import Intervals, pack
from hocket.simulate.shares.lane_blocks import LaneBlocks

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
