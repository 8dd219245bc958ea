"""Where a wave waits so that it and the one before never hold more than there is room for.

What a wave holds at each of its ops is known from its graph, and so is the most that it will hold
from an op on. A wave may do an op when what it then holds and the most that the wave before will
still hold fit together: so it waits for the op of that wave from which on this is true. The wave
before never waits for the one behind it, so both end; and the room is kept however fast either is.
O(ops + reads), numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, LongArray
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.sections import LaneWait
from hocket.simulate.parallel.lanes import pass_order


class WaveLives(NamedTuple):
    """Storages that a wave makes: their sizes, and the positions in its lane of who makes each and
    of who uses it last."""

    num_bytes: LongArray
    made_at: LongArray
    used_at: LongArray
    is_output: BoolArray
    """Whether it is there to the end of the wave because it is asked for."""

    def held(self, num_ops: int) -> LongArray:
        """What lives during each of so many ops."""
        change = np.zeros(num_ops + 1, dtype=np.int64)
        np.add.at(change, self.made_at, self.num_bytes)
        np.add.at(change, self.used_at + 1, -self.num_bytes)
        held: LongArray = np.cumsum(change)[:num_ops]
        return held

    def only(self, which: BoolArray) -> WaveLives:
        """Some of them."""
        return WaveLives(
            self.num_bytes[which], self.made_at[which], self.used_at[which], self.is_output[which]
        )


def wave_lives(graph: Graph) -> WaveLives:
    """All that a wave makes.

    A gradient is there until it is added to the sum, right after it was made.
    """
    order = pass_order(graph)
    position = np.full(graph.num_ops, -1)
    position[order] = np.arange(len(order))
    owners = np.flatnonzero((graph.tensor_producer >= 0) & (graph.held_bytes > 0))
    owners = owners[position[graph.tensor_producer[owners]] >= 0]
    start = position[graph.tensor_producer[owners]]
    number = np.full(graph.num_tensors, -1)
    number[owners] = np.arange(len(owners))
    reader = graph.reader
    used = number[graph.root_of[graph.reads]]
    counts = (used >= 0) & (graph.op_phase[reader] != Phase.OPTIMIZER)
    end = start.copy()
    np.maximum.at(end, used[counts], position[reader[counts]])
    end[graph.tensor_role[owners] == Role.GRADIENT] += 1
    is_output = graph.tensor_role[owners] == Role.OUTPUT
    end[is_output] = len(order) - 1
    return WaveLives(graph.held_bytes[owners], start, np.minimum(end, len(order) - 1), is_output)


def held_bytes(graph: Graph) -> LongArray:
    """What a wave has made and holds during each of its ops, in the order of its lane."""
    order = pass_order(graph)
    held: LongArray = wave_lives(graph).held(len(order)) + graph.workspace_bytes[order]
    return held


def room_waits(graph: Graph, num_waves: int, room_bytes: int) -> tuple[LaneWait, ...] | None:
    """Waits with which two waves of ``graph`` hold at most so much; None where one alone does not
    fit."""
    order, held = pass_order(graph), held_bytes(graph)
    if int(held.max(initial=0)) > room_bytes:
        return None
    # The most that is held after each op; falling, so that it can be searched.
    after = np.append(np.maximum.accumulate(held[::-1])[::-1][1:], 0)
    needed = np.searchsorted(-after, held - room_bytes, "left")
    needed = np.where(held + held.max() <= room_bytes, -1, needed)
    latest = np.maximum.accumulate(needed)
    grows = np.flatnonzero(np.diff(latest, prepend=-1) > 0).tolist()
    return tuple(
        LaneWait(wave, int(order[at]), wave - 1, int(order[latest[at]]))
        for wave in range(1, num_waves)
        for at in grows
    )
