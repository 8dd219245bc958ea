"""Compiled state of the ParDNN mapping: ops, tensors and work per device along the time axis.

The work of each device is a Fenwick tree over the distinct top levels of ops, so that the work in a
span is a difference of two prefix sums. The trees of all devices are interleaved in memory, so that
querying one device after another hits the cache. For tensors it counts the ops on each device that
make or read them: a piece of the graph saves, on a device, the transfers of the tensors that it
shares with the ops there, each once.
O(log ops) per span and device, O(log ops + devices · tensors) per op that moves or is queried.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.kernels import kernel
from hocket.kernels.containers import table, zeros
from hocket.plan.problem import Problem
from hocket.planners.placement.pardnn.work import Devices, UnitWork


class MappingFacts(NamedTuple):
    """Inputs of the mapping, constant while ops are mapped."""

    op_s: FloatArray
    """[op, device]: infinite where the op may not go."""
    speed: FloatArray
    """Per device."""
    position: LongArray
    """Of each op on the axis of time."""
    read_ptr: LongArray
    reads: LongArray
    made_ptr: LongArray
    producer: LongArray
    user_ptr: LongArray
    users: LongArray
    tensor_s: FloatArray


class MappingLedger(NamedTuple):
    """Current mapping: device of each op, work and tensor uses per device."""

    device: LongArray
    """Of each op; -1 for none yet."""
    tree_s: FloatArray
    """[position, device]: Fenwick trees of work, from row 1."""
    num_touching: NDArray[np.int32]
    """[tensor, device]: ops on the device that make or read the tensor."""
    stamp: LongArray
    """Per tensor: the last query that reached it."""
    query: LongArray
    """One number: the count of queries so far."""
    own_s: FloatArray
    """Answer of `weigh`: time of the piece on each device."""
    saved_s: FloatArray
    """Answer of `weigh`: transfers that the piece saves by being on each device."""


class MappedPieces(NamedTuple):
    """Sets of ops that are mapped as one, with the spans of time in which they run."""

    number: LongArray
    """The piece of each op; -1 for none."""
    ptr: LongArray
    op: LongArray
    """Ops of piece p: ``op[ptr[p]:ptr[p + 1]]``, ascending."""
    first: LongArray
    stop: LongArray
    """[piece, 2]: half-open spans of positions; the second may be empty."""
    share_s: FloatArray
    """Per piece: seconds of all work in its spans if devices shared it by their speeds."""


class Axis(NamedTuple):
    """The axis of time: distinct top levels, and the work that begins before each of them."""

    time_s: FloatArray
    position: LongArray
    """Of each op."""
    before_s: FloatArray
    """One entry more than there are times."""
    speed: float
    """Of all devices together."""


def axis_of(work: UnitWork, devices: Devices, top_s: FloatArray) -> Axis:
    """The axis of time that the top levels of ops span."""
    time_s, position = np.unique(top_s, return_inverse=True)
    begun_s = np.bincount(position, weights=work.op_s, minlength=len(time_s))
    before_s = np.concatenate(([0.0], np.cumsum(begun_s)))
    return Axis(time_s, position.astype(np.int64), before_s, float(devices.speed.sum()))


def facts_of(
    problem: Problem, work: UnitWork, devices: Devices, position: LongArray
) -> MappingFacts:
    """The facts of a problem."""
    graph = problem.graph
    return MappingFacts(
        op_s=table(devices.op_s.T, np.float64),
        speed=table(devices.speed, np.float64),
        position=table(position, np.int64),
        read_ptr=table(graph.read_ptr, np.int64),
        reads=table(graph.reads, np.int64),
        made_ptr=table(graph.made_ptr, np.int64),
        producer=table(graph.tensor_producer, np.int64),
        user_ptr=table(graph.user_ptr, np.int64),
        users=table(graph.users, np.int64),
        tensor_s=work.tensor_s,
    )


def new_ledger(facts: MappingFacts, num_positions: int) -> MappingLedger:
    """A ledger with nothing on any device."""
    num_ops, num_devices = facts.op_s.shape
    num_tensors = len(facts.tensor_s)
    return MappingLedger(
        device=np.full(num_ops, -1, dtype=np.int64),
        tree_s=np.zeros((num_positions + 1, num_devices)),
        num_touching=np.zeros((num_tensors, num_devices), dtype=np.int32),
        stamp=zeros(num_tensors),
        query=zeros(1),
        own_s=np.zeros(num_devices),
        saved_s=np.zeros(num_devices),
    )


def pieces_of(axis: Axis, number: LongArray, first: LongArray, stop: LongArray) -> MappedPieces:
    """The ops of each number as a piece with the given spans; those with -1 belong to none."""
    member = np.flatnonzero(number >= 0)
    order = member[np.argsort(number[member], kind="stable")]
    within_s = np.maximum(axis.before_s[stop] - axis.before_s[first], 0.0).sum(axis=1)
    return MappedPieces(
        number=table(number, np.int64),
        ptr=table(pointers(np.bincount(number[member], minlength=len(first))), np.int64),
        op=table(order, np.int64),
        first=table(first, np.int64),
        stop=table(stop, np.int64),
        share_s=table(within_s / axis.speed, np.float64),
    )


@kernel
def _count_tensors(
    facts: MappingFacts, ledger: MappingLedger, op: int, device: int, change: int
) -> None:
    for index in range(facts.read_ptr[op], facts.read_ptr[op + 1]):
        ledger.num_touching[facts.reads[index], device] += change
    for tensor in range(facts.made_ptr[op], facts.made_ptr[op + 1]):
        ledger.num_touching[tensor, device] += change


@kernel
def _count_work(
    facts: MappingFacts, ledger: MappingLedger, op: int, device: int, change: int
) -> None:
    at = facts.position[op] + 1
    seconds = change * facts.op_s[op, device]
    while at < len(ledger.tree_s):
        ledger.tree_s[at, device] += seconds
        at += at & -at


@kernel
def put(
    facts: MappingFacts, ledger: MappingLedger, pieces: MappedPieces, piece: int, device: int
) -> None:
    """Map the ops of a piece to a device, but for those that cannot run there."""
    for index in range(pieces.ptr[piece], pieces.ptr[piece + 1]):
        op = pieces.op[index]
        if facts.op_s[op, device] < np.inf:
            ledger.device[op] = device
            _count_tensors(facts, ledger, op, device, 1)
            _count_work(facts, ledger, op, device, 1)


@kernel
def lift(facts: MappingFacts, ledger: MappingLedger, pieces: MappedPieces, piece: int) -> None:
    """Take the ops of a piece off their devices."""
    for index in range(pieces.ptr[piece], pieces.ptr[piece + 1]):
        op = pieces.op[index]
        device = ledger.device[op]
        if device >= 0:
            _count_tensors(facts, ledger, op, device, -1)
            _count_work(facts, ledger, op, device, -1)
            ledger.device[op] = -1


@kernel
def _save(ledger: MappingLedger, tensor: int, seconds: float) -> None:
    """Count the transfer of a tensor as saved wherever the tensor is, once per query."""
    if ledger.stamp[tensor] == ledger.query[0] or seconds == 0.0:
        return
    ledger.stamp[tensor] = ledger.query[0]
    for device in range(len(ledger.saved_s)):
        if ledger.num_touching[tensor, device] > 0:
            ledger.saved_s[device] += seconds


@kernel
def weigh(facts: MappingFacts, ledger: MappingLedger, pieces: MappedPieces, piece: int) -> None:
    """Fill ``own_s`` and ``saved_s`` for a piece that is on no device."""
    ledger.query[0] += 1
    ledger.own_s[:] = 0.0
    ledger.saved_s[:] = 0.0
    for index in range(pieces.ptr[piece], pieces.ptr[piece + 1]):
        op = pieces.op[index]
        for device in range(len(ledger.own_s)):
            ledger.own_s[device] += facts.op_s[op, device]
        for read in range(facts.read_ptr[op], facts.read_ptr[op + 1]):
            _save(ledger, facts.reads[read], facts.tensor_s[facts.reads[read]])
        for tensor in range(facts.made_ptr[op], facts.made_ptr[op + 1]):
            _save(ledger, tensor, facts.tensor_s[tensor])


@kernel
def weigh_lifted(
    facts: MappingFacts, ledger: MappingLedger, pieces: MappedPieces, piece: int, device: int
) -> None:
    """Weigh a piece that is on one device as if it were on none."""
    for index in range(pieces.ptr[piece], pieces.ptr[piece + 1]):
        _count_tensors(facts, ledger, pieces.op[index], device, -1)
    weigh(facts, ledger, pieces, piece)
    for index in range(pieces.ptr[piece], pieces.ptr[piece + 1]):
        _count_tensors(facts, ledger, pieces.op[index], device, 1)


@kernel
def _prefix_s(ledger: MappingLedger, stop: int, device: int) -> float:
    total_s, at = 0.0, stop
    while at > 0:
        total_s += ledger.tree_s[at, device]
        at -= at & -at
    return total_s


@kernel
def load_s(ledger: MappingLedger, pieces: MappedPieces, piece: int, device: int) -> float:
    """Work of a device in the spans of a piece."""
    total_s = 0.0
    for span in range(2):
        first, stop = pieces.first[piece, span], pieces.stop[piece, span]
        if first < stop:
            total_s += _prefix_s(ledger, stop, device) - _prefix_s(ledger, first, device)
    return total_s


@kernel
def cost_s(
    facts: MappingFacts,
    ledger: MappingLedger,
    pieces: MappedPieces,
    piece: int,
    device: int,
    beside_s: float,
    stiffness: float,
) -> float:
    """Cost of a weighed piece on a device that has other work in its spans.

    Its own work, more of it the more of the span is taken, less the transfers that it saves. This
    is what the sum over devices of stiffness · speed · work² / (2 · share) grows by, which is
    smallest when all are busy equally long, so moving pieces one after another to where they
    cost less comes to an end.
    """
    own_s, share_s = ledger.own_s[device], pieces.share_s[piece]
    if own_s == np.inf:
        return np.inf
    cost: float = -ledger.saved_s[device]
    if share_s > 0.0:
        cost += stiffness * facts.speed[device] * own_s * (beside_s + 0.5 * own_s) / share_s
    return cost
