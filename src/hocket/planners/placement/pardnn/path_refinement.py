"""ParDNN step 1c, refinement: paths move or exchange devices, then single units move.

A path moves to the device where it costs less (`mapping_ledger.cost_s`). A path that would save
transfers on another device, but finds it too full, waits; a waiting path of that device that runs
at the same time exchanges devices with it if both together cost less. Then units move by the same
rule within the spans of their paths (node switching). The best weight of an even load against
transfers depends on the graph, so several weights are tried and the simulator decides. O(sweeps ·
(ops log ops + devices · reads)).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, LongArray
from hocket.kernels import kernel
from hocket.kernels.containers import table, zeros
from hocket.planners.placement.pardnn.mapping_ledger import (
    MappedPieces,
    MappingFacts,
    MappingLedger,
    cost_s,
    lift,
    load_s,
    put,
    weigh,
    weigh_lifted,
)
from hocket.planners.placement.pardnn.path_mapping import Mapping, unit_pieces
from hocket.planners.placement.pardnn.path_slices import Slices
from hocket.planners.placement.pardnn.simulated_trials import Trial, Trials, faster, fitter
from hocket.planners.placement.pardnn.unit_work import UnitWork

_STIFFNESS = (1.0, 2.0, 4.0, 8.0)
"""Weights of an even load against transfers that are tried."""
_MAX_SWEEPS = 12
_MANY = 64
"""Number of readers above which a tensor is ignored: it hardly shows which ops are close."""
_FEW = 500
"""Sweeps end when at most one in this many pieces moved."""
_LEAST_GAIN = 1e-9
"""Relative gain in cost from which a piece moves, so that rounding moves nothing."""


def refine(
    work: UnitWork, slices: Slices, mapping: Mapping, trials: Trials, mapped: Trial
) -> tuple[Trial, Trial]:
    """Return the trial with the shortest step and the one with least overflow, after sweeps.

    Both are chosen among the mapped placement and the placement found for each weight.
    """
    fastest = fittest = mapped
    units = _units_in_paths(work, slices, mapping)
    for stiffness in _STIFFNESS:
        # Sweeps change these arrays in place, and every weight starts from the same mapping.
        ledger = mapping.ledger._replace(
            device=mapping.ledger.device.copy(),
            tree_s=mapping.ledger.tree_s.copy(),
            num_touching=mapping.ledger.num_touching.copy(),
        )
        sweep(mapping.facts, ledger, mapping.paths, stiffness)
        sweep(mapping.facts, ledger, units, stiffness)
        found = trials(ledger.device.astype(np.int32))
        fastest, fittest = faster(fastest, found), fitter(fittest, found)
    return fastest, fittest


def sweep(
    facts: MappingFacts, ledger: MappingLedger, pieces: MappedPieces, stiffness: float
) -> None:
    """Move pieces to lower cost until hardly any moves.

    The first sweep visits all pieces, later ones those that share tensors with moved pieces.
    """
    num_devices, num_pieces = len(ledger.own_s), len(pieces.share_s)
    is_due = np.ones(num_pieces, dtype=np.bool_)
    for _ in range(_MAX_SWEEPS):
        moved = zeros(1)
        waiting = np.full((num_devices, num_devices), -1, dtype=np.int64)
        _sweep_once(facts, ledger, pieces, stiffness, is_due, waiting, moved)
        if moved[0] * _FEW <= num_pieces:
            break


def _units_in_paths(work: UnitWork, slices: Slices, mapping: Mapping) -> MappedPieces:
    """Return every unit as a piece, with the spans of the path that contains its ops."""
    units = unit_pieces(work, mapping.axis, np.ones(len(work.units.of), dtype=np.bool_))
    path = slices.path[units.op[units.ptr[:-1]]]
    return units._replace(
        first=table(mapping.paths.first[path], np.int64),
        stop=table(mapping.paths.stop[path], np.int64),
        share_s=table(mapping.paths.share_s[path], np.float64),
    )


@kernel
def _device_of(ledger: MappingLedger, pieces: MappedPieces, piece: int) -> int:
    """Device of a piece, or -1 if its ops are on several devices."""
    device: int = ledger.device[pieces.op[pieces.ptr[piece]]]
    for index in range(pieces.ptr[piece] + 1, pieces.ptr[piece + 1]):
        if ledger.device[pieces.op[index]] != device:
            return -1
    return device


@kernel
def _mark_users(facts: MappingFacts, pieces: MappedPieces, tensor: int, is_due: BoolArray) -> None:
    first, stop = facts.user_ptr[tensor], facts.user_ptr[tensor + 1]
    if stop - first > _MANY:
        return
    for index in range(first, stop):
        is_due[pieces.number[facts.users[index]]] = True
    if facts.producer[tensor] >= 0:
        is_due[pieces.number[facts.producer[tensor]]] = True


@kernel
def _mark_near(facts: MappingFacts, pieces: MappedPieces, piece: int, is_due: BoolArray) -> None:
    """Mark pieces that share a tensor with a moved piece, so that the sweep tries them again."""
    for index in range(pieces.ptr[piece], pieces.ptr[piece + 1]):
        op = pieces.op[index]
        for read in range(facts.read_ptr[op], facts.read_ptr[op + 1]):
            _mark_users(facts, pieces, facts.reads[read], is_due)
        for tensor in range(facts.made_ptr[op], facts.made_ptr[op + 1]):
            _mark_users(facts, pieces, tensor, is_due)


@kernel
def _match(pieces: MappedPieces, one: int, other: int) -> bool:
    """True if two pieces overlap in time and have a similar number of ops.

    Pieces of different sizes would upset the balance, and trying them costs as much as trying the
    larger one.
    """
    num_one = pieces.ptr[one + 1] - pieces.ptr[one]
    num_other = pieces.ptr[other + 1] - pieces.ptr[other]
    is_alike: bool = num_one <= 2 * num_other and num_other <= 2 * num_one
    return (
        is_alike
        and pieces.first[one, 0] < pieces.stop[other, 0]
        and pieces.first[other, 0] < pieces.stop[one, 0]
    )


@kernel
def _pair_cost_s(
    facts: MappingFacts,
    ledger: MappingLedger,
    pieces: MappedPieces,
    one: int,
    one_device: int,
    other: int,
    other_device: int,
    stiffness: float,
) -> float:
    """Return the joint cost of two unmapped pieces; the first stays mapped to ``one_device``."""
    weigh(facts, ledger, pieces, one)
    others_s = load_s(ledger, pieces, one, one_device)
    cost = cost_s(facts, ledger, pieces, one, one_device, others_s, stiffness)
    put(facts, ledger, pieces, one, one_device)
    weigh(facts, ledger, pieces, other)
    others_s = load_s(ledger, pieces, other, other_device)
    return cost + cost_s(facts, ledger, pieces, other, other_device, others_s, stiffness)


@kernel
def _swap(
    facts: MappingFacts,
    ledger: MappingLedger,
    pieces: MappedPieces,
    one: int,
    other: int,
    stiffness: float,
) -> bool:
    """Exchange the devices of two pieces if this lowers their joint cost; True if so."""
    here, there = _device_of(ledger, pieces, one), _device_of(ledger, pieces, other)
    lift(facts, ledger, pieces, one)
    lift(facts, ledger, pieces, other)
    stay_s = _pair_cost_s(facts, ledger, pieces, one, here, other, there, stiffness)
    lift(facts, ledger, pieces, one)
    swap_s = _pair_cost_s(facts, ledger, pieces, one, there, other, here, stiffness)
    if swap_s < stay_s - _LEAST_GAIN * abs(stay_s):
        # `_pair_cost_s` has mapped the first piece already.
        put(facts, ledger, pieces, other, here)
        return True
    lift(facts, ledger, pieces, one)
    put(facts, ledger, pieces, one, here)
    put(facts, ledger, pieces, other, there)
    return False


@kernel
def _sweep_once(
    facts: MappingFacts,
    ledger: MappingLedger,
    pieces: MappedPieces,
    stiffness: float,
    is_due: BoolArray,
    waiting: LongArray,
    moved: LongArray,
) -> None:
    """Visit each marked piece and move it or exchange it with a waiting piece.

    ``waiting[a, b]`` is the last piece on device a that would save more transfers on b.
    """
    for piece in range(len(is_due)):
        here = _device_of(ledger, pieces, piece) if is_due[piece] else -1
        is_due[piece] = False
        if here < 0:
            continue
        weigh_lifted(facts, ledger, pieces, piece, here)
        # All ops of a piece are in its spans, so its own work is part of the load there.
        others_s = load_s(ledger, pieces, piece, here) - ledger.own_s[here]
        stay_s = cost_s(facts, ledger, pieces, piece, here, others_s, stiffness)
        best, least_s = here, stay_s - _LEAST_GAIN * abs(stay_s)
        wanted = here
        for device in range(len(ledger.own_s)):
            # Most devices are too expensive even without other work, which is quick to find out.
            idle_s = cost_s(facts, ledger, pieces, piece, device, 0.0, stiffness)
            if device == here or idle_s >= least_s:
                continue
            others_s = load_s(ledger, pieces, piece, device)
            cost = cost_s(facts, ledger, pieces, piece, device, others_s, stiffness)
            if cost < least_s:
                best, least_s = device, cost
            if ledger.saved_s[device] > ledger.saved_s[wanted]:
                wanted = device
        if best != here:
            lift(facts, ledger, pieces, piece)
            put(facts, ledger, pieces, piece, best)
            _mark_near(facts, pieces, piece, is_due)
            moved[0] += 1
        elif wanted != here:
            other = waiting[wanted, here]
            if (
                other >= 0
                and _device_of(ledger, pieces, other) == wanted
                and _match(pieces, piece, other)
                and _swap(facts, ledger, pieces, piece, other, stiffness)
            ):
                waiting[wanted, here] = -1
                _mark_near(facts, pieces, piece, is_due)
                _mark_near(facts, pieces, other, is_due)
                moved[0] += 1
            else:
                waiting[here, wanted] = piece
