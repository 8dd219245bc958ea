"""What two lanes of a device hold over a step: every storage and workspace with its life.

A block lives from the start of the op that makes it to the end of the last that uses it, as the
simulator saw them; where that is none of a wave's ops, to the next of its lane that is. Beside that
stands, lane by lane, the last op that uses it: who takes its place in memory from the other lane
has to wait for that one. Gradients and what updates use live on to the end of the step.
O(ops + reads), numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections.lanes import NUM_LANES, Lanes
from hocket.simulate.parallel import ExpandedStep
from hocket.simulate.parallel.lanes import LANE_STREAMS, pass_order
from hocket.simulate.timeline import Timeline


@dataclass(frozen=True, eq=False, kw_only=True)
class LaneBlocks:
    """Blocks of memory of one device over a step with two lanes."""

    num_bytes: LongArray
    start_s: FloatArray
    end_s: FloatArray
    lane: IntArray
    """That of the op which makes it."""
    made_at: IntArray
    """The position of that op among those of its lane; -1 where it is an update."""
    used_at: IntArray
    """[lane, block]: the position of the last op of each lane that uses it; -1 for none."""
    sequence: tuple[tuple[tuple[int, int], ...], ...]
    """Per lane, its ops as (microbatch, op of the given graph), in order."""

    def curve(self, lane: int | None = None) -> tuple[FloatArray, LongArray]:
        """Times, and the bytes that one lane or both hold from each of them on."""
        return self._curve(slice(None) if lane is None else self.lane == lane)

    def peak_bytes(self, lane: int | None = None) -> int:
        """The most that one lane or both hold at once."""
        return int(self.curve(lane)[1].max(initial=0))

    def slab_of(self, places: Sequence[Sequence[int]]) -> LongArray:
        """The slab of each block where lanes have memory of their own, by the op that makes it;
        ``places`` are those of `Lanes`. Sums of gradients are in the lane's own."""
        if not places:
            return self.lane.astype(np.int64)
        table = np.array(places)
        # A lane has one wave after the other, all of the same ops.
        found = table[self.lane, self.made_at % table.shape[1]]
        return np.where(self.made_at < 0, self.lane, found).astype(np.int64)

    def slab_peaks(self, lanes: Lanes) -> list[int]:
        """The most that each slab of a plan holds at once."""
        if not lanes.own_bytes:
            return [self.peak_bytes()]
        slab_of = self.slab_of(lanes.places)
        return [
            int(self._curve(slab_of == slab)[1].max(initial=0)) for slab in range(len(lanes.slabs))
        ]

    def _curve(self, kept: slice | BoolArray) -> tuple[FloatArray, LongArray]:
        times = np.concatenate((self.start_s[kept], self.end_s[kept]))
        change = np.concatenate((self.num_bytes[kept], -self.num_bytes[kept]))
        order = np.lexsort((change, times))
        times, held = times[order], np.cumsum(change[order])
        last = np.ones(len(times), dtype=np.bool_)
        last[:-1] = np.diff(times) > 0
        return times[last], held[last]


def lane_blocks(given: Graph, unfolded: ExpandedStep, timeline: Timeline) -> LaneBlocks:
    """The blocks of the first replica's device; ``given`` is the graph of a single wave."""
    graph, passes = unfolded.problem.graph, unfolded.passes[0]
    order = pass_order(given)
    order = order[passes[0, order] >= 0]
    sequence = [
        [(wave, op) for wave in range(lane, len(passes), NUM_LANES) for op in order.tolist()]
        for lane in range(NUM_LANES)
    ]
    rows = [np.array([passes[wave, op] for wave, op in ops], dtype=np.int64) for ops in sequence]
    lane_of, position = _positions(graph, timeline, rows)
    until_s = np.full(graph.num_ops, timeline.makespan_s)
    for lane, row in enumerate(rows):
        here = (lane_of == lane) & (position >= 0) & (position < len(row))
        until_s[here] = timeline.op_end_s[row[position[here]]]
    device = int(unfolded.device_of[passes[0].max()])
    is_here = unfolded.device_of == device
    root, producer = graph.root_of, graph.tensor_producer
    owners = np.flatnonzero((producer >= 0) & (graph.held_bytes > 0) & is_here[producer])
    number = np.full(graph.num_tensors, -1)
    number[owners] = np.arange(len(owners))
    reader = graph.reader
    user = np.concatenate((producer[owners], reader))
    used = np.concatenate((np.arange(len(owners)), number[root[graph.reads]]))
    user, used = user[used >= 0], used[used >= 0]
    end_s = np.zeros(len(owners))
    np.maximum.at(end_s, used, np.maximum(until_s[user], timeline.op_end_s[user]))
    held = number[root[graph.is_held]]
    end_s[held[held >= 0]] = timeline.makespan_s
    used_at = np.full((NUM_LANES, len(owners)), -1)
    np.maximum.at(used_at, (lane_of[user], used), position[user])
    working = np.flatnonzero(is_here & (graph.workspace_bytes > 0) & (lane_of >= 0))
    makers = np.concatenate((producer[owners], working))
    at_work = np.full((NUM_LANES, len(working)), -1)
    at_work[lane_of[working], np.arange(len(working))] = position[working]
    is_pass = np.zeros(graph.num_ops, dtype=np.bool_)
    is_pass[np.concatenate(rows)] = True
    return LaneBlocks(
        num_bytes=np.concatenate((graph.held_bytes[owners], graph.workspace_bytes[working])),
        start_s=timeline.op_start_s[makers],
        end_s=np.concatenate((end_s, np.maximum(until_s, timeline.op_end_s)[working])),
        lane=lane_of[makers].astype(np.int32),
        made_at=np.where(is_pass[makers], position[makers], -1).astype(np.int32),
        used_at=np.concatenate((used_at, at_work), axis=1).astype(np.int32),
        sequence=tuple(tuple(ops) for ops in sequence),
    )


def _positions(
    graph: Graph, timeline: Timeline, rows: list[LongArray]
) -> tuple[LongArray, LongArray]:
    """Per op its lane and its position there.

    A sum of gradients stands where the next op of its lane does; what comes after all of them, and
    updates, behind the last.
    """
    lane_of = np.where(graph.op_stream == LANE_STREAMS[1], 1, 0).astype(np.int64)
    position = np.full(graph.num_ops, -1, dtype=np.int64)
    for lane, row in enumerate(rows):
        position[row] = np.arange(len(row))
        others = np.flatnonzero((lane_of == lane) & (position < 0))
        late = graph.op_phase[others] == Phase.OPTIMIZER
        after = np.searchsorted(timeline.op_start_s[row], timeline.op_start_s[others], "right")
        position[others] = np.where(late, len(row), after)
    return lane_of, position
