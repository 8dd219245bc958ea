"""Closed form of captured ops: seconds and bytes by microbatch size and position in the model.

Costs of ops are prefix sums along the forward pass. Backward ops and updates are counted at the
position of their forward op, so the cost of a stage is the difference of two sums. Sizes between
the computed ones are interpolated. The closed form selects the candidates that are simulated; it
agrees with the simulation of the best candidates within 3 %. O(sizes x device types x ops).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.graph.graph import Graph, Phase, Role
from hocket.hardware.host_route import host_route
from hocket.plan.gradient_buckets import BUCKET_BYTES
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel, Replica
from hocket.planners.memory.blocks import cut_step
from hocket.simulate.engine import simulate_parallel
from hocket.simulate.parallel.batch_costs import accumulate_s, gradients_of, priced_at
from hocket.simulate.parallel.stage_order import places_of

_MAX_SIZES = 20
"""Largest number of microbatch sizes whose costs are computed; others are interpolated."""
_MAX_CUTS = 96
"""Largest number of places at which a pipeline may be cut."""
Relief = Literal["none", "host", "all"]
"""Memory savings of a device: none, updates on the host, or also recomputation of all blocks."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Prefix sums of one problem's costs along its forward pass."""

    problem: Problem
    num_samples: int
    sizes: LongArray
    """Microbatch sizes whose costs are computed, ascending, from 1 to the full batch."""
    passes_s: FloatArray
    """[device type, size, place]: forward and backward seconds of the ops before a place."""
    update_s: FloatArray
    """[device type, place]: seconds of the updates before a place."""
    accumulate_s: FloatArray
    """[device type]: seconds to add one microbatch's gradients to their sum."""
    state_bytes: LongArray
    """[place]: bytes of parameters, gradients and optimizer state of the ops before a place."""
    saved_bytes: FloatArray
    """[size, place]: bytes that the ops before a place save for the backward pass."""
    forward_s: FloatArray
    """[device type, size]: seconds of the forward pass."""
    crossing_bytes: FloatArray
    """[size, place]: bytes that a cut at a place sends forward."""
    optimizer_bytes: LongArray
    """[place]: bytes of the optimizer state of the ops before a place."""
    cuts: LongArray
    """Places at which a pipeline may be cut, ascending, with 0 and the number of ops."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all parameters."""
        graph = self.problem.graph
        return int(graph.tensor_bytes[gradients_of(graph)].sum())

    @cached_property
    def largest_bucket_bytes(self) -> int:
        """Upper bound on the size of a gradient bucket."""
        graph = self.problem.graph
        largest = int(graph.tensor_bytes[gradients_of(graph)].max(initial=0))
        return largest + BUCKET_BYTES

    def row(self, device: int) -> int:
        """Row of a device's type in the tables."""
        return int(self.problem.costs.device_row[device])

    def twin(self, device: int) -> int:
        """The first device of the same type, which has the same times and memory use."""
        return int(np.argmax(self.problem.costs.device_row == self.row(device)))

    @cached_property
    def alike(self) -> list[int]:
        """[device]: the first device of the same type and memory; their closed forms are equal."""
        first: dict[tuple[int, int], int] = {}
        keys = zip(
            self.problem.costs.device_row.tolist(), self.problem.memory_bytes.tolist(), strict=True
        )
        return [first.setdefault(key, device) for device, key in enumerate(keys)]

    def pass_s(self, device: int) -> FloatArray:
        """[samples]: forward and backward seconds of the full model on a device, from 0 samples."""
        return self._by_samples(self.passes_s[self.row(device), :, -1])

    def forward_pass_s(self, device: int) -> FloatArray:
        """[samples]: forward seconds of the full model on a device, from 0 samples."""
        return self._by_samples(self.forward_s[self.row(device)])

    def _by_samples(self, by_size: FloatArray) -> FloatArray:
        """[samples]: values of the computed sizes, interpolated for all numbers of samples."""
        numbers = np.arange(self.num_samples + 1)
        values: FloatArray = np.interp(numbers, np.append(0, self.sizes), np.append(0.0, by_size))
        return values

    def forward_part(self, device: int, size: int) -> float:
        """Fraction of the forward pass in the time of both passes."""
        total_s = max(float(self.stage_s(device, size)[-1]), 1e-30)
        return float(self.forward_pass_s(device)[size]) / total_s

    def stage_s(self, device: int, size: int) -> FloatArray:
        """[place]: forward and backward seconds of the ops before a place, at any size."""
        return at_size(self, self.passes_s[self.row(device)], size)


@lru_cache(maxsize=8)
def tables_of(problem: Problem) -> Tables:
    """Prefix sums of a problem whose graph records how it scales with the batch."""
    graph = problem.graph
    other = graph.other_batch
    assert other is not None, "only batches whose sizes are known are shared"
    # Small sizes are not proportional in time, so all of them are computed.
    sizes = priced_sizes(other.num_samples)
    place = places_of(graph)
    sized = [priced_at(problem, int(size)) for size in sizes]
    is_pass = graph.op_phase != Phase.OPTIMIZER
    passes = np.stack([_along(place, np.where(is_pass, p.costs.op_s, 0.0)) for p in sized], axis=1)
    sums = accumulate_s(problem, tuple(gradients_of(graph).tolist())).sum(axis=1)
    return Tables(
        problem=problem,
        num_samples=other.num_samples,
        sizes=sizes,
        passes_s=passes,
        update_s=_along(place, np.where(is_pass, 0.0, problem.costs.op_s)),
        accumulate_s=sums,
        forward_s=np.stack([_forward_s(p) for p in sized], axis=1),
        state_bytes=_state_bytes(graph, place),
        optimizer_bytes=_held_bytes(graph, place, graph.tensor_role == Role.OPTIMIZER_STATE),
        saved_bytes=np.stack([_saved_bytes(p.graph, place) for p in sized]),
        crossing_bytes=np.stack([_crossing_bytes(p.graph, place) for p in sized]),
        cuts=_cuts(graph, place),
    )


def priced_sizes(num_samples: int) -> LongArray:
    """Microbatch sizes whose costs are computed: all small ones, then a geometric series."""
    if num_samples <= _MAX_SIZES:
        return np.arange(1, num_samples + 1, dtype=np.int64)
    small = np.arange(1, 9)
    steps = np.geomspace(8, num_samples, _MAX_SIZES - 7)[1:]
    return np.unique(np.append(small, np.rint(steps))).astype(np.int64)


def _along(place: IntArray, seconds: FloatArray) -> FloatArray:
    """[device type, place]: sums over the ops before each place."""
    num_ops = len(place)
    at = np.zeros((len(seconds), num_ops + 1))
    for row, values in enumerate(seconds):
        # 1e9 seconds stand for "cannot run": infinity would make differences of sums NaN.
        finite = np.where(np.isfinite(values), values, 1e9)
        at[row, 1:] = np.bincount(place, finite, num_ops)
    return np.cumsum(at, axis=1)


def at_size(tables: Tables, table: FloatArray, size: int) -> FloatArray:
    """The row of a table [size, …] at a size, interpolated."""
    sizes = tables.sizes
    after = int(np.clip(np.searchsorted(sizes, size), 1, max(len(sizes) - 1, 1)))
    if len(sizes) == 1:
        # A single size can only be scaled in proportion.
        alone: FloatArray = table[0] * (size / sizes[0])
        return alone
    low, high = int(sizes[after - 1]), int(sizes[after])
    weight = (size - low) / (high - low)
    mixed: FloatArray = (1 - weight) * table[after - 1] + weight * table[after]
    return mixed


def _state_bytes(graph: Graph, place: IntArray) -> LongArray:
    lasting = np.isin(graph.tensor_role, (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.BUFFER))
    return _held_bytes(graph, place, lasting | (graph.tensor_role == Role.GRADIENT))


def _held_bytes(graph: Graph, place: IntArray, chosen: BoolArray) -> LongArray:
    """[place]: prefix sums of the bytes of chosen tensors, each at the place of its owner op."""
    held = np.where(chosen, graph.held_bytes, 0)
    at = np.bincount(place[np.maximum(graph.owner_op, 0)], held, graph.num_ops)
    return np.append(0, np.cumsum(at)).astype(np.int64)


def _forward_s(problem: Problem) -> FloatArray:
    """[device type]: seconds of the forward pass."""
    op_s = problem.costs.op_s[:, problem.graph.op_phase == Phase.FORWARD]
    found: FloatArray = np.where(np.isfinite(op_s), op_s, 1e9).sum(axis=1)
    return found


@lru_cache(maxsize=16)
def block_edges(graph: Graph) -> tuple[int, ...]:
    """First ops of the blocks that may be recomputed, and the end of the last of them.

    The last block of a step, with its loss, is never recomputed: its backward pass follows at
    once.
    """
    return tuple(cut_step(graph).start.tolist()[:-1])


def _is_saved(graph: Graph) -> BoolArray:
    """[tensor]: True for storages that forward ops make and backward ops read."""
    is_backward = graph.op_phase[graph.users] == Phase.BACKWARD
    tensor = np.repeat(np.arange(graph.num_tensors), np.diff(graph.user_ptr))
    saved = np.zeros(graph.num_tensors, dtype=np.bool_)
    saved[graph.root_of[tensor[is_backward]]] = True
    maker = graph.tensor_producer
    is_forward = (maker >= 0) & (graph.op_phase[np.maximum(maker, 0)] == Phase.FORWARD)
    # Views own no storage.
    kept: BoolArray = saved & is_forward & (graph.alias_of < 0)
    return kept


def _saved_bytes(graph: Graph, place: IntArray) -> FloatArray:
    saved = _is_saved(graph)
    maker = np.maximum(graph.tensor_producer, 0)
    at = np.bincount(place[maker[saved]], graph.tensor_bytes[saved], graph.num_ops)
    return np.append(0.0, np.cumsum(at))


def _crossing_bytes(graph: Graph, place: IntArray) -> FloatArray:
    """[place]: bytes of activations that cross a cut at this place."""
    maker = graph.tensor_producer
    is_forward = (maker >= 0) & (graph.op_phase[np.maximum(maker, 0)] == Phase.FORWARD)
    reader = graph.reader
    counted = (graph.op_phase[reader] == Phase.FORWARD) & is_forward[graph.reads]
    last = np.full(graph.num_tensors, -1, dtype=np.int64)
    # Views of a storage are read instead of it: what crosses is the storage, once.
    np.maximum.at(last, graph.root_of[graph.reads[counted]], place[reader[counted]])
    rows = np.flatnonzero(is_forward & (last >= 0) & (graph.alias_of < 0))
    change = np.zeros(graph.num_ops + 2)
    np.add.at(change, place[maker[rows]] + 1, graph.tensor_bytes[rows])
    np.add.at(change, np.maximum(last[rows], place[maker[rows]]) + 1, -graph.tensor_bytes[rows])
    return np.cumsum(change)[: graph.num_ops + 1]


def _cuts(graph: Graph, place: IntArray) -> LongArray:
    """Places at which a pipeline may be cut; of many, those with the fewest bytes to send."""
    forward = (graph.op_phase == Phase.FORWARD) & graph.works
    places = np.unique(place[forward])[1:]
    crossing = _crossing_bytes(graph, place)[places]
    if len(places) > _MAX_CUTS:
        # One of each stretch of the forward pass, so that cuts lie everywhere.
        stretch = np.arange(len(places)) * _MAX_CUTS // len(places)
        order = np.lexsort((crossing, stretch))
        first = np.unique(stretch[order], return_index=True)[1]
        places = np.sort(places[order[first]])
    return np.concatenate(([0], places, [graph.num_ops])).astype(np.int64)


# ── what one device holds ────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=4096)
def peak_bytes(problem: Problem, device: int, size: int, is_repeated: bool) -> int:
    """Simulated peak memory of a device for one or for several microbatches of a size."""
    name = problem.cluster.device_names[device]
    replica = Replica(devices=(name,), microbatches=(size,) * (2 if is_repeated else 1))
    _, timeline = simulate_parallel(problem, Parallel(replicas=(replica,)))
    return int(timeline.peak_bytes[device])


def held_bytes(tables: Tables, device: int, size: int, is_repeated: bool, relief: Relief) -> float:
    """Peak memory of a device: simulated without relief, estimated with it."""
    # The cache is by the first device of a type, so a cluster needs one simulation per type.
    plain = peak_bytes(tables.problem, tables.twin(device), size, is_repeated)
    if relief == "none":
        return plain
    without = plain - float(tables.optimizer_bytes[-1])
    if relief == "host":
        return without
    edges = np.array(block_edges(tables.problem.graph))
    kept = np.diff(at_size(tables, tables.saved_bytes, size)[edges])
    inputs = at_size(tables, tables.crossing_bytes, size)[edges[:-1]]
    # Recompute keeps the input of each block and one block's activations at a time.
    given = np.maximum(kept - inputs, 0.0)
    return without - max(float(given.sum() - kept.max(initial=0)), 0.0)


def host_update_s(tables: Tables, device: int) -> float:
    """Estimated extra seconds of an optimizer step on the host, compared with one on the device.

    Updates and copies overlap, so the longer of the two counts.
    """
    graph = tables.problem.graph
    is_update = graph.op_phase == Phase.OPTIMIZER
    route = host_route(tables.problem.cluster, tables.problem.cluster.devices[device])
    host_s = float(graph.bytes_touched[is_update].sum()) / tables.problem.cluster.host_update_bps
    moved_s = tables.gradient_bytes / min(route.out_bps, route.in_bps)
    return max(host_s, moved_s) - float(tables.update_s[tables.row(device), -1])


def largest_size(
    tables: Tables, device: int, *, is_repeated: bool, spare_bytes: int, relief: Relief = "none"
) -> int:
    """The largest microbatch that fits on a device; 0 if not even one sample fits."""
    usable = int(tables.problem.memory_bytes[device]) - spare_bytes
    low, high = 0, tables.num_samples
    while low < high:
        middle = (low + high + 1) // 2
        if held_bytes(tables, device, middle, is_repeated, relief) <= usable:
            low = middle
        else:
            high = middle - 1
    return low
