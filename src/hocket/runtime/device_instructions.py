"""Split a traced step into one list of instructions per device.

All ops and transfers are put into one global order that respects every dependency. The list of a
device is the subsequence of this order that concerns the device; a transfer appears in the lists of
both its devices. Devices therefore cannot deadlock, and each pair of devices exchanges tensors in
the same order on both sides. O((ops + reads) log ops).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import CheckError
from hocket.capture.program import Program
from hocket.graph.graph import Graph, Role
from hocket.runtime.cpu_attention import FUSED_ATTENTION
from hocket.runtime.tensor_bytes import needs_storage
from hocket.simulate.instructions import Instructions
from hocket.simulate.timeline import Timeline


class Do(IntEnum):
    """Type of an instruction; its ``number`` is that of an op, a transfer or a tensor."""

    RUN = 0
    """Run op ``number``."""
    SEND = 1
    """Start to send transfer ``number``; its tensor exists by then."""
    POST = 2
    """Prepare to receive transfer ``number``."""
    WAIT = 3
    """Wait until transfer ``number`` has arrived."""
    DROP = 4
    """Drop tensor ``number``: no later op on this device needs it."""


class Instruction(NamedTuple):
    """One action of a device."""

    do: Do
    number: int


class Transfer(NamedTuple):
    """Transfer of one tensor from one device to another."""

    tensor: int
    src: int
    dst: int


@dataclass(frozen=True, eq=False, kw_only=True)
class StepCalls:
    """Instructions of every device in one step."""

    num_devices: int
    transfers: tuple[Transfer, ...]
    sequence: tuple[tuple[int, Instruction], ...]
    """Device and instruction, in the global order."""
    present: tuple[tuple[int, ...], ...]
    """Per device, the tensors that exist before the step."""
    is_kept: Sequence[bool]
    """Per tensor, True if it outlives the step on its own device."""

    def of_device(self, device: int) -> list[Instruction]:
        """Return the instructions of one device, in order."""
        return [instruction for owner, instruction in self.sequence if owner == device]

    @property
    def used_devices(self) -> list[int]:
        """Devices that run an op, or the first device if there are no ops."""
        used = {owner for owner, (do, _) in self.sequence if do == Do.RUN}
        return sorted(used) or [0]


def split(
    graph: Graph,
    tables: Instructions,
    *,
    timeline: Timeline | None = None,
    order: Sequence[IntArray] | None = None,
) -> StepCalls:
    """Return the instructions of every device, in order.

    Ops and transfers are ordered by their start times in ``timeline``, the simulated step, or
    without it by the position of ops. ``order`` is the planned order of ops per device, if any.
    """
    places, device_of = tables.places, tables.runs.device
    num_devices, owner_of = len(places.start_bytes), places.device[: graph.num_tensors]
    transfers = [
        Transfer(tensor, int(owner_of[tensor]), int(places.device[place]))
        for tensor, place in zip(
            tables.transfers.tensor.tolist(), tables.transfers.place.tolist(), strict=True
        )
    ]
    op_key, transfer_key = _keys(graph, transfers, timeline)
    nodes = _in_order(graph, device_of, transfers, order, op_key, transfer_key)
    before = np.flatnonzero(~places.is_copy & (graph.tensor_producer[places.tensor] < 0))
    present: list[list[int]] = [[] for _ in range(num_devices)]
    for tensor, device in zip(places.tensor[before], places.device[before], strict=True):
        present[device].append(int(tensor))
    emitter = _Emitter(graph, device_of, owner_of, transfers)
    emitted = emitter.emit(nodes)
    return StepCalls(
        num_devices=num_devices,
        transfers=tuple(transfers),
        sequence=tuple(emitted),
        present=tuple(tuple(sorted(tensors)) for tensors in present),
        is_kept=emitter.is_kept_by_owner,
    )


def _keys(
    graph: Graph, transfers: Sequence[Transfer], timeline: Timeline | None
) -> tuple[FloatArray, FloatArray]:
    """Return the sort keys of all ops and all transfers: simulated start times, or positions."""
    if timeline is None:
        producer = graph.tensor_producer[[transfer.tensor for transfer in transfers]]
        return np.arange(graph.num_ops, dtype=np.float64), producer.astype(np.float64)
    start_s = dict(
        zip(
            zip(timeline.transfer_tensor.tolist(), timeline.transfer_dst.tolist(), strict=True),
            timeline.transfer_start_s.tolist(),
            strict=True,
        )
    )
    keys = np.array([start_s[t.tensor, t.dst] for t in transfers], dtype=np.float64)
    return timeline.op_start_s, keys


def _in_order(
    graph: Graph,
    device_of: LongArray,
    transfers: Sequence[Transfer],
    order: Sequence[IntArray] | None,
    op_key: FloatArray,
    transfer_key: FloatArray,
) -> Iterator[int]:
    """Yield ops and transfers in topological order, the smallest key first among the ready ones.

    Transfers are numbered after the ops.
    """
    followers: list[list[int]] = [[] for _ in range(graph.num_ops + len(transfers))]
    num_waiting = [0] * len(followers)

    def after(first: int, second: int) -> None:
        followers[first].append(second)
        num_waiting[second] += 1

    arrives = {(t.tensor, t.dst): graph.num_ops + n for n, t in enumerate(transfers)}
    for number, transfer in enumerate(transfers):
        producer = int(graph.tensor_producer[transfer.tensor])
        if producer >= 0:
            after(producer, graph.num_ops + number)
    devices = device_of.tolist()
    for op in range(graph.num_ops):
        for tensor in graph.reads_of(op).tolist():
            arrival = arrives.get((tensor, devices[op]), -1)
            maker = arrival if arrival >= 0 else int(graph.tensor_producer[tensor])
            if maker >= 0:
                after(maker, op)
    for sequence in order or ():
        for first, second in zip(sequence[:-1].tolist(), sequence[1:].tolist(), strict=True):
            after(first, second)
    keys = [*op_key.tolist(), *transfer_key.tolist()]
    # At equal times transfers go first: receivers wait less for a tensor that is sent early.
    ready = [(keys[n], n < graph.num_ops, n) for n, left in enumerate(num_waiting) if not left]
    heapq.heapify(ready)
    num_taken = 0
    while ready:
        _, _, node = heapq.heappop(ready)
        num_taken += 1
        yield node
        for follower in followers[node]:
            num_waiting[follower] -= 1
            if not num_waiting[follower]:
                heapq.heappush(ready, (keys[follower], follower < graph.num_ops, follower))
    if num_taken < len(followers):
        stuck = next(op for op in range(graph.num_ops) if num_waiting[op])
        raise CheckError(
            f"op {graph.op_names[stuck]!r} would wait forever: the planned order contradicts "
            "the dependencies of ops",
            hint="hocket verify lists the violations of the plan",
        )


class _Emitter:
    """Turns the global order into instructions, with a drop after the last use of each tensor."""

    def __init__(
        self, graph: Graph, device_of: LongArray, owner_of: LongArray, transfers: Sequence[Transfer]
    ) -> None:
        self.graph, self.transfers = graph, transfers
        self.device_of, self.owner_of = device_of.tolist(), owner_of.tolist()
        self.arrives = {(t.tensor, t.dst): number for number, t in enumerate(transfers)}
        self.waited: set[int] = set()
        self.num_uses: Counter[tuple[int, int]] = Counter((t.tensor, t.src) for t in transfers)
        for op, device in enumerate(self.device_of):
            self.num_uses.update((tensor, device) for tensor in graph.reads_of(op).tolist())
        role = graph.tensor_role
        is_result = (role == Role.GRADIENT) | (role == Role.OUTPUT)
        self.is_kept_by_owner = ((graph.tensor_producer < 0) | is_result).tolist()
        self.is_batch = ((graph.tensor_producer < 0) & (role == Role.INPUT)).tolist()

    def emit(self, nodes: Iterator[int]) -> Iterator[tuple[int, Instruction]]:
        for node in nodes:
            if node < self.graph.num_ops:
                yield from self._op(node)
            else:
                yield from self._transfer(node - self.graph.num_ops)

    def _op(self, op: int) -> Iterator[tuple[int, Instruction]]:
        device = self.device_of[op]
        reads = self.graph.reads_of(op).tolist()
        for tensor in reads:
            transfer = self.arrives.get((tensor, device), -1)
            # One wait per transfer: the tensor stays on the device until its last use there.
            if transfer >= 0 and transfer not in self.waited:
                self.waited.add(transfer)
                yield device, Instruction(Do.WAIT, transfer)
        yield device, Instruction(Do.RUN, op)
        for tensor in reads:
            yield from self._used(tensor, device)
        for tensor in self.graph.made_by(op):
            if not self.num_uses[tensor, device] and not self.is_kept_by_owner[tensor]:
                yield device, Instruction(Do.DROP, tensor)

    def _transfer(self, number: int) -> Iterator[tuple[int, Instruction]]:
        tensor, src, dst = self.transfers[number]
        yield src, Instruction(Do.SEND, number)
        yield dst, Instruction(Do.POST, number)
        yield from self._used(tensor, src)

    def _used(self, tensor: int, device: int) -> Iterator[tuple[int, Instruction]]:
        self.num_uses[tensor, device] -= 1
        is_owner = self.owner_of[tensor] == device
        stays = self.is_batch[tensor] or (is_owner and self.is_kept_by_owner[tensor])
        if not self.num_uses[tensor, device] and not stays:
            yield device, Instruction(Do.DROP, tensor)


class Setup:
    """A traced program and the device of each op, shared by all runners of the program."""

    def __init__(
        self, graph: Graph, program: Program, device_of: IntArray, split: StepCalls
    ) -> None:
        self.graph, self.program, self.split = graph, program, split
        self.device_of: list[int] = device_of.tolist()

    @cached_property
    def senders(self) -> frozenset[int]:
        """Ops whose results are sent."""
        producers = (self.program.tensors[t.tensor].producer for t in self.split.transfers)
        return frozenset(producer for producer in producers if producer >= 0)

    @cached_property
    def sent(self) -> frozenset[int]:
        """Tensors that are sent to another device."""
        return frozenset(transfer.tensor for transfer in self.split.transfers)

    @cached_property
    def is_whole(self) -> list[bool]:
        """Per transfer, True if the entire storage is sent."""
        return [
            needs_storage(self.program, tensor, self._readers(tensor, dst))
            for tensor, _, dst in self.split.transfers
        ]

    @cached_property
    def host_tensors(self) -> frozenset[int]:
        """Tensors that GPU kernels return in host memory: generator states of fused attention."""
        return frozenset(
            output
            for call in self.program.calls
            if call.cost.kind == FUSED_ATTENTION
            for output in call.outputs[2:]
            if output is not None
        )

    def _readers(self, tensor: int, device: int) -> list[int]:
        users = self.graph.users_of(tensor).tolist()
        return [op for op in users if self.device_of[op] == device]
