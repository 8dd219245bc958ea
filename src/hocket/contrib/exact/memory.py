"""Memory in the model: held bytes as sums, activations over time where they could be too many.

Counted are held bytes, the storages that ops make, workspaces and copies, each for no longer than
the simulator counts it; what only aliases or transfers keep alive is left out. So what the
simulator calls feasible is feasible here, and bounds stay true; the other way round the simulator
has the last word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hocket.base.arrays import LongArray
from hocket.contrib.exact.instance import Read
from hocket.contrib.exact.model import Model

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import IntervalVar, IntVar, LiteralT


def add_memory(
    model: Model, memory_bytes: LongArray, transfer_start: dict[tuple[int, int], IntVar]
) -> bool:
    """Keep every device within its usable bytes; whether some device could need more over time."""
    instance, graph = model.instance, model.instance.problem.graph
    units = instance.units
    room = memory_bytes.copy()
    room[0] -= units.unread_bytes
    blocks = [instance.blocks(int(held)) for held in units.held_bytes]
    for device in model.devices:
        limit = instance.blocks(max(int(room[device]), 0))
        held = sum(blocks[unit] * model.place[unit][device] for unit in range(units.count))
        model.cp.add(held <= limit)
    most = graph.held_bytes.sum() + graph.tensor_bytes.sum() + graph.workspace_bytes.max(initial=0)
    scarce = [device for device in model.devices if room[device] < most]
    if scarce:
        _add_activations(model, scarce, room, transfer_start)
    return bool(scarce)


class _Demands:
    """Intervals and the blocks that they take, per device."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._intervals: list[list[IntervalVar]] = [[] for _ in model.devices]
        self._blocks: list[list[int]] = [[] for _ in model.devices]

    def take(
        self, device: int, num_bytes: int, start: IntVar | int, end: IntVar, present: LiteralT
    ) -> None:
        blocks = self._model.instance.blocks(num_bytes)
        if blocks == 0:
            return
        size = self._model.cp.new_int_var(0, self._model.horizon, "held for")
        interval = self._model.cp.new_optional_interval_var(start, size, end, present, "bytes")
        self._intervals[device].append(interval)
        self._blocks[device].append(blocks)

    def limit(self, device: int, num_bytes: int) -> None:
        limit = self._model.instance.blocks(max(num_bytes, 0))
        intervals, blocks = self._intervals[device], self._blocks[device]
        self._model.cp.add_cumulative(intervals, blocks, limit)


def _add_activations(
    model: Model,
    scarce: list[int],
    room: LongArray,
    transfer_start: dict[tuple[int, int], IntVar],
) -> None:
    instance, graph = model.instance, model.instance.problem.graph
    demands = _Demands(model)
    reads_of: dict[int, list[Read]] = {}
    for read in instance.reads:
        reads_of.setdefault(read.tensor, []).append(read)
    ends = [
        _home_end(model, tensor, reads_of.get(tensor, [])) for tensor in range(graph.num_tensors)
    ]
    before = _held_before(model)
    for device in scarce:
        for unit, num_bytes in enumerate(before):
            here = model.place[unit][device]
            demands.take(device, int(num_bytes), 0, model.makespan, here)
        for op in range(graph.num_ops):
            here = model.on(op, device)
            workspace = int(graph.workspace_bytes[op])
            demands.take(device, workspace, model.start[op], model.end[op], here)
            for tensor in graph.made_by(op):
                held = int(graph.held_bytes[tensor])
                demands.take(device, held, model.start[op], ends[tensor], here)
        for tensor, reads in reads_of.items():
            _take_copy(model, demands, tensor, reads, device, transfer_start)
        demands.limit(device, int(room[device]))


def _held_before(model: Model) -> LongArray:
    """Per unit: bytes of what exists before the step."""
    graph, units = model.instance.problem.graph, model.instance.units
    before = np.flatnonzero(
        (graph.tensor_producer < 0) & (graph.alias_of < 0) & graph.is_held & (units.home_op >= 0)
    )
    held = np.zeros(units.count, dtype=np.int64)
    np.add.at(held, units.of_op[units.home_op[before]], graph.tensor_bytes[before])
    return held


def _home_end(model: Model, tensor: int, reads: list[Read]) -> IntVar:
    """When the storage of a tensor is released at home: after its reads there, or later."""
    graph, cp = model.instance.problem.graph, model.cp
    source = int(graph.tensor_producer[tensor])
    if source < 0 or graph.is_held[tensor]:
        return model.makespan
    end = cp.new_int_var(0, model.horizon, f"release of tensor {tensor}")
    cp.add(end >= model.end[source])
    for read in reads:
        home, reader = model.unit(source), model.unit(read.reader)
        if home == reader:
            cp.add(end >= model.end[read.reader])
        else:
            same = model.same_device(home, reader)
            cp.add(end >= model.end[read.reader]).only_enforce_if(same)
    return end


def _take_copy(
    model: Model,
    demands: _Demands,
    tensor: int,
    reads: list[Read],
    device: int,
    transfer_start: dict[tuple[int, int], IntVar],
) -> None:
    """A copy is there from the start of its transfer to the end of its last read."""
    cp, source, home = model.cp, reads[0].source, model.unit(reads[0].home)
    readers = frozenset(model.unit(read.reader) for read in reads) - {home}
    num_bytes = int(model.instance.problem.graph.tensor_bytes[tensor])
    if not readers or model.instance.blocks(num_bytes) == 0:
        return
    present = cp.new_bool_var(f"copy of tensor {tensor} on {device}")
    there = model.any_there(readers, device)
    cp.add_min_equality(present, [there, ~model.place[home][device]])
    end = cp.new_int_var(0, model.horizon, f"release of copy of tensor {tensor}")
    for read in reads:
        if model.unit(read.reader) != home:
            here = model.on(read.reader, device)
            cp.add(end >= model.end[read.reader]).only_enforce_if([here, present])
    made = model.end[source] if source >= 0 else 0
    demands.take(device, num_bytes, transfer_start.get((tensor, device), made), end, present)
