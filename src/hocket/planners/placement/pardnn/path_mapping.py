"""ParDNN step 1b, mapping: every path to a device, by the work that runs at the same time.

Each device gets one primary path, the fastest device the heaviest path. If the transfers of a
secondary path take longer than the other work in its span, running it concurrently gains nothing,
and it joins the device where it saves most transfers. The others follow by decreasing weight and
length, each on the device where it costs least (level-aware load balancing). The paper adds all
work in the span to the communication, which in a long span outweighs any transfer; here the cost of
a path is its own time, scaled by how full its span is. O(ops log ops + devices · (paths log ops +
reads)).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray, spans
from hocket.kernels import kernel
from hocket.kernels.containers import table, zeros
from hocket.plan.problem import Problem
from hocket.planners.placement.pardnn.mapping_ledger import (
    Axis,
    MappedPieces,
    MappingFacts,
    MappingLedger,
    axis_of,
    cost_s,
    facts_of,
    load_s,
    new_ledger,
    pieces_of,
    put,
    weigh,
)
from hocket.planners.placement.pardnn.path_slices import Slices
from hocket.planners.placement.pardnn.unit_work import Devices, UnitWork


class Mapping(NamedTuple):
    """Result of the mapping, and the data on which it is based."""

    facts: MappingFacts
    ledger: MappingLedger
    axis: Axis
    paths: MappedPieces
    num_merged: int


def map_paths(problem: Problem, work: UnitWork, devices: Devices, slices: Slices) -> Mapping:
    """Map every path; ops that cannot run on the device of their path are mapped separately."""
    axis = axis_of(work, devices, slices.top_s)
    facts = facts_of(problem, work, devices, axis.position)
    ledger = new_ledger(facts, len(axis.time_s))
    paths = pieces_of(axis, slices.path, *spans_of(work, slices, axis))
    weight_s: FloatArray = np.bincount(
        slices.path, weights=work.op_s, minlength=slices.num_paths
    ).astype(np.float64)
    _map_primary(facts, ledger, paths, *_matching(weight_s[: slices.num_primary], devices))
    secondary = np.arange(slices.num_primary, slices.num_paths)
    others_s = table(paths.share_s * axis.speed - weight_s, np.float64)
    num_merged = zeros(1)
    _merge(facts, ledger, paths, slices.path, secondary, others_s, num_merged)
    _balance(facts, ledger, paths, secondary[_falling(weight_s[secondary], paths, secondary)])
    left = unit_pieces(work, axis, ledger.device < 0)
    _balance(facts, ledger, left, np.arange(len(left.share_s)))
    return Mapping(facts, ledger, axis, paths, int(num_merged[0]))


def spans_of(work: UnitWork, slices: Slices, axis: Axis) -> tuple[LongArray, LongArray]:
    """Return starts and ends of two spans per path: its own, and that of other ops in its units.

    The first reaches from the end of the last parent of the path's first op to the start of the
    first child of its last op; the second covers ops of its units that are not on the path.
    Overlapping spans are merged.
    """
    num, top_s = slices.num_paths, slices.top_s
    start_s, stop_s = np.zeros(num), np.full(num, np.inf)
    edge, path = spans(work.parent_ptr, slices.head)
    parent = work.parent[edge]
    np.maximum.at(start_s, path, top_s[parent] + work.op_s[parent])
    edge, path = spans(work.child_ptr, slices.tail)
    np.minimum.at(stop_s, path, top_s[work.child[edge]])
    first, stop = np.zeros((num, 2), dtype=np.int64), np.zeros((num, 2), dtype=np.int64)
    begin, end = np.searchsorted(axis.time_s, start_s), np.searchsorted(axis.time_s, stop_s)
    first[:, 0] = np.minimum(begin, axis.position[slices.head])
    stop[:, 0] = np.maximum(end, axis.position[slices.tail] + 1)
    off_path = np.flatnonzero(~slices.is_trunk)
    if len(off_path):
        first[:, 1] = len(axis.time_s)
        # One more than the last position stands for "no op yet" in the minimum below.
        np.minimum.at(first[:, 1], slices.path[off_path], axis.position[off_path])
        np.maximum.at(stop[:, 1], slices.path[off_path], axis.position[off_path] + 1)
        _join_overlapping(first, stop)
    return first, stop


def unit_pieces(work: UnitWork, axis: Axis, is_chosen: BoolArray) -> MappedPieces:
    """Return the units of chosen ops as pieces whose span is from their first op to their last."""
    chosen, dense = np.unique(work.units.of[is_chosen], return_inverse=True)
    number = np.full(len(work.units.of), -1, dtype=np.int64)
    number[is_chosen] = dense
    first = np.zeros((len(chosen), 2), dtype=np.int64)
    stop = np.zeros((len(chosen), 2), dtype=np.int64)
    first[:, 0] = len(axis.time_s)
    np.minimum.at(first[:, 0], dense, axis.position[is_chosen])
    np.maximum.at(stop[:, 0], dense, axis.position[is_chosen] + 1)
    return pieces_of(axis, number, first, stop)


def _join_overlapping(first: LongArray, stop: LongArray) -> None:
    overlaps = (first[:, 1] < stop[:, 0]) & (first[:, 0] < stop[:, 1])
    first[overlaps, 0] = first[overlaps].min(axis=1)
    stop[overlaps, 0] = stop[overlaps].max(axis=1)
    # The second span is empty if it was merged into the first or if all ops are on the path.
    empty = overlaps | (first[:, 1] >= stop[:, 1])
    first[empty, 1] = stop[empty, 1] = 0


def _matching(weight_s: FloatArray, devices: Devices) -> tuple[LongArray, LongArray]:
    """Return primary paths from heavy to light, and their devices from fast to slow."""
    heavy = np.argsort(-weight_s, kind="stable")
    fast = np.argsort(-devices.speed, kind="stable")[: len(heavy)]
    return heavy.astype(np.int64), fast.astype(np.int64)


def _falling(weight_s: FloatArray, paths: MappedPieces, chosen: LongArray) -> LongArray:
    """Positions of the chosen paths by decreasing sum of relative weight and relative length."""
    length = np.diff(paths.ptr)[chosen]
    heaviest_s, longest = weight_s.max(initial=0.0), length.max(initial=1)
    rank = length / longest
    if heaviest_s > 0:
        rank = rank + weight_s / heaviest_s
    return np.argsort(-rank, kind="stable").astype(np.int64)


@kernel
def _map_primary(
    facts: MappingFacts,
    ledger: MappingLedger,
    paths: MappedPieces,
    chosen: LongArray,
    devices: LongArray,
) -> None:
    for index in range(len(chosen)):
        put(facts, ledger, paths, chosen[index], devices[index])


@kernel
def _crossing_s(facts: MappingFacts, paths: MappedPieces, path_of: LongArray, path: int) -> float:
    """Seconds of the transfers into a path or of those out of it, whichever is more."""
    incoming_s, outgoing_s = 0.0, 0.0
    for index in range(paths.ptr[path], paths.ptr[path + 1]):
        op = paths.op[index]
        for read in range(facts.read_ptr[op], facts.read_ptr[op + 1]):
            tensor = facts.reads[read]
            if facts.producer[tensor] >= 0 and path_of[facts.producer[tensor]] != path:
                incoming_s += facts.tensor_s[tensor]
        for tensor in range(facts.made_ptr[op], facts.made_ptr[op + 1]):
            for user in range(facts.user_ptr[tensor], facts.user_ptr[tensor + 1]):
                if path_of[facts.users[user]] != path:
                    outgoing_s += facts.tensor_s[tensor]
                    # A tensor is sent once per device, so one reader outside is enough.
                    break
    return max(incoming_s, outgoing_s)


@kernel
def _merge(
    facts: MappingFacts,
    ledger: MappingLedger,
    paths: MappedPieces,
    path_of: LongArray,
    chosen: LongArray,
    others_s: FloatArray,
    num_merged: LongArray,
) -> None:
    """Map paths whose transfers other work cannot hide to the device that saves most of them."""
    for path in chosen:
        if _crossing_s(facts, paths, path_of, path) < others_s[path]:
            continue
        weigh(facts, ledger, paths, path)
        best, most_s = -1, 0.0
        for device in range(len(ledger.own_s)):
            if ledger.own_s[device] < np.inf and ledger.saved_s[device] > most_s:
                best, most_s = device, ledger.saved_s[device]
        if best >= 0:
            put(facts, ledger, paths, path, best)
            num_merged[0] += 1


@kernel
def _balance(
    facts: MappingFacts, ledger: MappingLedger, pieces: MappedPieces, order: LongArray
) -> None:
    """Map each unmapped piece, in the given order, to the device where it costs least."""
    for piece in order:
        if ledger.device[pieces.op[pieces.ptr[piece]]] >= 0:
            continue
        weigh(facts, ledger, pieces, piece)
        best, least_s = -1, np.inf
        for device in range(len(ledger.own_s)):
            mapped_s = load_s(ledger, pieces, piece, device)
            cost = cost_s(facts, ledger, pieces, piece, device, mapped_s, 1.0)
            if cost < least_s or (
                best >= 0 and cost == least_s and ledger.saved_s[device] > ledger.saved_s[best]
            ):
                best, least_s = device, cost
        if best >= 0:
            put(facts, ledger, pieces, piece, best)
