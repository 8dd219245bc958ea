"""A pass of a loop in the simulator: tiles are ops, workers are devices, hand-overs transfers.

A tile takes its share of the loop's time and the waking of its worker; what the next worker needs
of it is a tensor on the way between them. Arrays of which every worker has its own are brought
together by an op of the first worker, after each step (buffered) or after the last (summed,
scratch). Workers take their tiles in the order of the tiling. O(tiles) ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hocket.cost.costs import Costs, TimeSource, device_rows
from hocket.graph.build import GraphBuilder
from hocket.hardware.cluster import Cluster, Device, DeviceKind, Link
from hocket.loops.choice import BYTES_PER_S, STEP_S, TiledOption
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.engine import simulate
from hocket.simulate.timeline import Timeline

_MEMORY_BYTES = 2**50


@dataclass(frozen=True)
class PredictedPass:
    """One pass of a loop as it would run."""

    timeline: Timeline
    tile_ops: tuple[int, ...]
    """The work of the timeline that is each tile; the rest are exchanges."""
    speed_up: float
    """Over one worker."""

    @property
    def seconds(self) -> float:
        """From the first tile to the last exchange."""
        return self.timeline.makespan_s

    def spans_s(self) -> list[tuple[float, float]]:
        """Start and end of every tile."""
        ops = list(self.tile_ops)
        starts, ends = self.timeline.op_start_s[ops], self.timeline.op_end_s[ops]
        return list(zip(starts.tolist(), ends.tolist(), strict=True))


def predicted_pass(candidate: TiledOption) -> PredictedPass:
    """Simulate one pass."""
    draft = _PassDraft(candidate)
    tiling = candidate.tiling
    for number, tile in enumerate(tiling.tiles):
        draft.add_tile(number)
        is_last = number + 1 == len(tiling.tiles) or tiling.tiles[number + 1].step != tile.step
        if is_last and candidate.option.buffered:
            draft.add_exchange(number)
    if candidate.option.summed | candidate.option.private and not candidate.option.buffered:
        draft.add_exchange(len(tiling.tiles) - 1)
    timeline = simulate(*draft.problem())
    speed_up = candidate.work_s / timeline.makespan_s if timeline.makespan_s else 1.0
    return PredictedPass(timeline, tuple(draft.tile_ops), speed_up)


@dataclass
class _PassDraft:
    """A graph in the making."""

    candidate: TiledOption
    builder: GraphBuilder = field(default_factory=lambda: GraphBuilder("loop"))
    op_s: list[float] = field(default_factory=list)
    op_device: list[int] = field(default_factory=list)
    tile_ops: list[int] = field(default_factory=list)
    made: dict[int, int] = field(default_factory=dict)
    """Tile -> the tensor that those after it read."""
    exchanged: int | None = None
    """The tensor of the last exchange, which all tiles of the next step read."""
    since: int = 0
    """The first tile after it."""

    @cached_property
    def num_handed(self) -> int:
        """Tiles that follow one of another worker: what moves goes with them."""
        return sum(1 for tile in self.candidate.tiling.tiles if tile.after)

    def add_tile(self, number: int) -> None:
        """A tile after those that it names, on its worker."""
        candidate, tile = self.candidate, self.candidate.tiling.tiles[number]
        reads = [self.made[other] for other in tile.after]
        if self.exchanged is not None:
            reads.append(self.exchanged)
        time_s = tile.num_iterations * candidate.iteration_s + STEP_S
        op = self._op(f"tile {number}", tile.worker, time_s, reads)
        self.tile_ops.append(op)
        size = candidate.moved_bytes // self.num_handed if self.num_handed else 0
        self.made[number] = self.builder.tensor(f"after {number}", size, producer=op)

    def add_exchange(self, last: int) -> None:
        """Bring the workers' own arrays together after the tiles up to ``last``."""
        steps = self.candidate.tiling.num_steps if self.candidate.option.buffered else 1
        moved_bytes = 0 if self.num_handed else self.candidate.moved_bytes
        time_s = moved_bytes / steps / BYTES_PER_S
        reads = [self.made[number] for number in range(self.since, last + 1)]
        op = self._op(f"exchange {last}", 0, time_s, reads)
        self.exchanged = self.builder.tensor(f"exchanged {last}", 0, producer=op)
        self.since = last + 1

    def _op(self, name: str, worker: int, time_s: float, reads: Sequence[int]) -> int:
        self.op_s.append(time_s)
        self.op_device.append(worker)
        return self.builder.op(name, "loop", reads=sorted(set(reads)))

    def problem(self) -> tuple[Problem, Plan]:
        """The graph on workers that hand rows to each other through memory."""
        graph = self.builder.build()
        cluster = _cluster(self.candidate.tiling.num_workers)
        costs = Costs(
            kind_names=(cluster.kinds[0].name,), op_s=np.array([self.op_s]),
            op_source=np.full((1, graph.num_ops), TimeSource.FILE, dtype=np.uint8),
            device_row=device_rows(cluster), routes=cluster.routes,
            tensor_bytes=graph.tensor_bytes, tensor_s=None, settings={},
        )  # fmt: skip
        device_of = np.array(self.op_device, dtype=np.int32)
        in_turn = [np.flatnonzero(device_of == worker) for worker in range(cluster.num_devices)]
        orders = tuple(each.astype(np.int32) for each in in_turn)
        problem = Problem(work=graph, cluster=cluster, op_costs=costs, transfers="parallel")
        return problem, Plan(planner="loop").placing(device_of, by_device=orders)


def _cluster(num_workers: int) -> Cluster:
    kind = DeviceKind(
        name="core", memory_bytes=_MEMORY_BYTES, peak_flops={}, memory_bandwidth_bps=BYTES_PER_S,
        is_cpu=True,
    )  # fmt: skip
    names = tuple(f"worker {number}" for number in range(num_workers))
    memory = Link(name="memory", ends=names, bandwidth_bps=BYTES_PER_S, latency_s=0.0)
    devices = tuple(
        Device(name=name, kind=kind, host="host", memory_bytes=_MEMORY_BYTES) for name in names
    )
    links = (memory,) if num_workers > 1 else ()
    return Cluster(name="cores", devices=devices, hosts=("host",), links=links)
