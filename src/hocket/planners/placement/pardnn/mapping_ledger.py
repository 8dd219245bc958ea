"""Compiled state of the ParDNN mapping: ops, tensors and work per device along the time axis.

The work of each device is a Fenwick tree over the distinct top levels of ops, so that the work in a
span is a difference of two prefix sums. The trees of all devices are interleaved in memory, so that
querying one device after another hits the cache. The ledger also counts, per tensor and device, the
ops there that make or read the tensor: mapping a piece (a set of ops) to a device saves the
transfers of the tensors that it shares with the ops there, each once. O(log ops) per span and
device, O(log ops + devices · tensors) per op that moves or is queried.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.kernels import kernel
from hocket.kernels.containers import table, zeros
from hocket.plan.problem import Problem
from hocket.planners.placement.pardnn.unit_work import Devices, UnitWork


class MappingFacts(NamedTuple):
    """Inputs of the mapping, constant while ops are mapped."""

    op_s: FloatArray
    """[op, device]: seconds; infinite if the op may not run there."""
    speed: FloatArray
    """Speed of each device relative to the mean; see `Devices`."""
    position: LongArray
    """Per op: its position on the time axis."""
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
    """Per op: its device; -1 if not mapped yet."""
    tree_s: FloatArray
    """[position + 1, device]: Fenwick trees of work; row 0 is unused."""
    num_touching: NDArray[np.int32]
    """[tensor, device]: number of ops on the device that make or read the tensor."""
    stamp: LongArray
    """Per tensor: number of the last query that counted it."""
    query: LongArray
    """Number of queries so far, an array of one number."""
    own_s: FloatArray
    """Per device, written by `weigh`: seconds of the piece's ops there."""
    saved_s: FloatArray
    """Per device, written by `weigh`: transfer seconds saved if the piece is there."""


class MappedPieces(NamedTuple):
    """Sets of ops that are mapped as one, with the time spans in which they run."""

    number: LongArray
    """Per op: its piece; -1 if none."""
    ptr: LongArray
    op: LongArray
    """Ops of piece p: ``op[ptr[p]:ptr[p + 1]]``, ascending."""
    first: LongArray
    stop: LongArray
    """[piece, 2]: the half-open spans ``first`` to ``stop``; the second may be empty."""
    share_s: FloatArray
    """Per piece: seconds of all work in its spans if split over the devices by speed."""


class Axis(NamedTuple):
    """The time axis: distinct top levels, and the work that begins before each of them."""

    time_s: FloatArray
    position: LongArray
    """Per op: its position on the axis."""
    before_s: FloatArray
    """Work that begins before each time; one more entry for all work."""
    speed: float
    """Total speed of all devices."""


def axis_of(work: UnitWork, devices: Devices, top_s: FloatArray) -> Axis:
    """Build the time axis from the top levels of ops."""
    time_s, position = np.unique(top_s, return_inverse=True)
    begun_s = np.bincount(position, weights=work.op_s, minlength=len(time_s))
    before_s = np.concatenate(([0.0], np.cumsum(begun_s)))
    return Axis(time_s, position.astype(np.int64), before_s, float(devices.speed.sum()))


def facts_of(
    problem: Problem, work: UnitWork, devices: Devices, position: LongArray
) -> MappingFacts:
    """Collect the inputs of the mapping."""
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
    """Return a ledger with no op mapped."""
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
    """Gather the ops of each number into a piece with the given spans; -1 marks ops of no piece."""
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
        # In a Fenwick tree ``at & -at`` is the number of entries that node ``at`` sums.
        at += at & -at


@kernel
def put(
    facts: MappingFacts, ledger: MappingLedger, pieces: MappedPieces, piece: int, device: int
) -> None:
    """Map the ops of a piece to a device, except ops that cannot run there."""
    for index in range(pieces.ptr[piece], pieces.ptr[piece + 1]):
        op = pieces.op[index]
        if facts.op_s[op, device] < np.inf:
            ledger.device[op] = device
            _count_tensors(facts, ledger, op, device, 1)
            _count_work(facts, ledger, op, device, 1)


@kernel
def lift(facts: MappingFacts, ledger: MappingLedger, pieces: MappedPieces, piece: int) -> None:
    """Remove the ops of a piece from their devices."""
    for index in range(pieces.ptr[piece], pieces.ptr[piece + 1]):
        op = pieces.op[index]
        device = ledger.device[op]
        if device >= 0:
            _count_tensors(facts, ledger, op, device, -1)
            _count_work(facts, ledger, op, device, -1)
            ledger.device[op] = -1


@kernel
def _save(ledger: MappingLedger, tensor: int, seconds: float) -> None:
    """Count a tensor's transfer as saved on every device that has the tensor, once per query."""
    # Comparing with the query's number avoids clearing an array for every query.
    if ledger.stamp[tensor] == ledger.query[0] or seconds == 0.0:
        return
    ledger.stamp[tensor] = ledger.query[0]
    for device in range(len(ledger.saved_s)):
        if ledger.num_touching[tensor, device] > 0:
            ledger.saved_s[device] += seconds


@kernel
def weigh(facts: MappingFacts, ledger: MappingLedger, pieces: MappedPieces, piece: int) -> None:
    """Fill ``own_s`` and ``saved_s`` for a piece that is not mapped."""
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
    """Fill ``own_s`` and ``saved_s`` for a piece on one device, as if it were not mapped."""
    # Lifting the piece would also update the work trees, which this query does not read.
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
    """Seconds of work mapped to a device in the spans of a piece."""
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
    others_s: float,
    stiffness: float,
) -> float:
    """Cost of mapping a weighed piece to a device that has ``others_s`` other work in its spans.

    Its own work, weighted by how much of the span other work already takes, minus the transfers
    saved. The first part is the increase of stiffness · speed · work² / (2 · share) on the device.
    The sum of these terms over devices is smallest if all are busy equally long, so moving pieces
    one after another to where they cost less terminates.
    """
    own_s, share_s = ledger.own_s[device], pieces.share_s[piece]
    if own_s == np.inf:
        return np.inf
    cost: float = -ledger.saved_s[device]
    if share_s > 0.0:
        cost += stiffness * facts.speed[device] * own_s * (others_s + 0.5 * own_s) / share_s
    return cost
