"""Contiguous splits: the best over some orders, then the best of all where that can be searched.

First DPL (Tarnawski et al., NeurIPS 2020): the pieces in a depth-first topological order, cut into
stages by the dynamic programme; several orders are tried. Then the programme over all ideals,
limited by what DPL found, which proves the optimum among splits whose devices can be put in an
order that no forward tensor goes against (nor, in reverse, a gradient of an op without a forward
partner). With too many ideals, moves of boundary pieces improve the best order's split instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import IntArray, LongArray, positions
from hocket.plan.problem import Problem
from hocket.planners.max_load.classes import DeviceClasses
from hocket.planners.max_load.lattice import chain_lattice, ideal_lattice
from hocket.planners.max_load.moves import Heat, annealed
from hocket.planners.max_load.pieces import Pieces, gathered, strong_components
from hocket.planners.max_load.split import StageSplit, best_split


def acyclic(pieces: Pieces, *, merge: bool) -> tuple[Pieces, IntArray]:
    """The pieces with every precedence cycle merged into one, and the new piece of each old one."""
    label = strong_components(pieces.before, pieces.after, pieces.num_pieces)
    if int(label.max(initial=-1)) + 1 == pieces.num_pieces:
        return pieces, label
    return gathered(pieces, label, merge=merge), label


def depth_first_order(pieces: Pieces, *, latest_first: bool = True) -> IntArray:
    """A topological order that follows each branch as far as it can before the next.

    Branches that become ready together are taken from the last or from the first.
    """
    count = pieces.num_pieces
    by_before = np.argsort(pieces.before, kind="stable")
    start = np.searchsorted(pieces.before[by_before], np.arange(count + 1)).tolist()
    targets = pieces.after[by_before].tolist()
    waiting = np.bincount(pieces.after, minlength=count).tolist()
    ready = [piece for piece in range(count) if waiting[piece] == 0]
    if not latest_first:
        ready.reverse()
    order = []
    while ready:
        piece = ready.pop()
        order.append(piece)
        reached = targets[start[piece] : start[piece + 1]]
        for target in reached if latest_first else reversed(reached):
            waiting[target] -= 1
            if waiting[target] == 0:
                ready.append(target)
    return np.array(order, dtype=np.int32)


# Necks: the pieces that a model narrows to, where PipeDream may cut it.
#
# PipeDream (Narayanan et al., SOSP 2019) splits a chain of layers. A model with branches becomes a
# chain if everything between two pieces that no precedence passes by is one layer. Found in one
# walk over a topological order: a piece is a neck if no precedence starts before it and ends after
# it. O(pieces + precedence).


def neck_blocks(pieces: Pieces) -> IntArray:
    """The block of each of the acyclic pieces: a neck with all that follows up to the next.

    Pieces without precedence can be on either side of a neck or remove it; of two
    depth-first orders the one with more necks counts.
    """
    orders = (depth_first_order(pieces, latest_first=latest) for latest in (True, False))
    return max(
        (_necks_blocks(pieces, order) for order in orders),
        key=lambda block_of: block_of.max(initial=-1),
    )


def _necks_blocks(pieces: Pieces, order: IntArray) -> IntArray:
    position = positions(order)
    passing = np.zeros(pieces.num_pieces + 1, dtype=np.int64)
    np.add.at(passing, position[pieces.before] + 1, 1)
    np.add.at(passing, position[pieces.after], -1)
    is_neck = np.cumsum(passing)[:-1] == 0
    block_of = np.empty(pieces.num_pieces, dtype=np.int32)
    # The first piece of an order is never passed by, so blocks count from 0.
    block_of[order] = np.cumsum(is_neck) - 1
    return block_of


_MAX_PIECES = 5000
"""Pieces above which listing ideals would take longer than it saves."""
_MAX_IDEALS = 60_000
_MAX_LOOKS = 200_000_000
"""Stages that the exact search may evaluate: about 10 s."""
_MAX_BLOCKS = 800
"""An order of more pieces is cut between blocks of them."""
_HARDLY = 1 - 1e-9
"""The exact search must find something better than DPL by more than rounding."""
_BOUNDARY_MOVES = Heat(num_tries=400_000, start=0.003, end=1e-5, max_length=16)
_TRIES_PER_PIECE = 1000


@dataclass(frozen=True, eq=False)
class FoundPlacement:
    """A placement of pieces and what is known of it."""

    device_of: IntArray
    """Per piece."""
    devices: IntArray
    """The devices in the order of their stages."""
    is_proven: bool
    """True if no contiguous split has a smaller maximum load."""


def by_order(pieces: Pieces, classes: DeviceClasses, *, is_alike: bool) -> FoundPlacement | None:
    """DPL: the best split over some topological orders; None where nothing fits."""
    ordered, label = _in_order(pieces, is_alike=is_alike)
    split = _best_over_orders(ordered, classes)
    return None if split is None else _found(label, classes, split, is_proven=False)


def between_necks(
    pieces: Pieces, classes: DeviceClasses, *, is_alike: bool
) -> FoundPlacement | None:
    """PipeDream: the best split that cuts only at necks; None where nothing fits."""
    ordered, label = _in_order(pieces, is_alike=is_alike)
    block_of = neck_blocks(ordered)
    blocks = gathered(ordered, block_of, merge=is_alike)
    split = _best_over_orders(blocks, classes)
    if split is None:
        return None
    split = replace(split, stage_of=split.stage_of[block_of])
    return _found(label, classes, split, is_proven=False)


def contiguous(
    problem: Problem, pieces: Pieces, classes: DeviceClasses, *, is_alike: bool
) -> FoundPlacement | None:
    """The best contiguous split that can be found; None where nothing fits."""
    ordered, label = _in_order(pieces, is_alike=is_alike)
    split = _best_over_orders(ordered, classes)
    few = ordered.num_pieces <= _MAX_PIECES
    lattice = ideal_lattice(ordered, _MAX_IDEALS) if few else None
    if lattice is not None:
        limit_s = np.inf if split is None else split.max_load_s * _HARDLY
        better = best_split(ordered, classes, lattice, limit_s, _MAX_LOOKS)
        split = better.split or split
        if split is not None and better.is_complete and is_alike:
            return _found(label, classes, split, is_proven=True)
    if split is None:
        return None
    found = _found(label, classes, split, is_proven=False)
    return _with_moved_boundaries(problem, pieces, classes, found)


def _in_order(pieces: Pieces, *, is_alike: bool) -> tuple[Pieces, IntArray]:
    """Acyclic pieces in a topological order, and the number there of each given piece."""
    whole, label = acyclic(pieces, merge=is_alike)
    order = positions(depth_first_order(whole)).astype(np.int32)
    return gathered(whole, order, merge=is_alike), order[label]


def _best_over_orders(pieces: Pieces, classes: DeviceClasses) -> StageSplit | None:
    """The best split over two depth-first orders and, where it is one, the order of the pieces."""
    orders = [depth_first_order(pieces), depth_first_order(pieces, latest_first=False)]
    if np.all(pieces.before < pieces.after):
        orders.append(np.arange(pieces.num_pieces, dtype=np.int32))
    best: StageSplit | None = None
    for order in orders:
        block_of = _blocks(pieces, order)
        blocks = pieces if block_of is None else gathered(pieces, block_of, merge=False)
        chain = order if block_of is None else np.arange(blocks.num_pieces, dtype=np.int32)
        limit_s = np.inf if best is None else best.max_load_s
        split = best_split(blocks, classes, chain_lattice(chain), limit_s, _MAX_LOOKS).split
        if split is not None and block_of is not None:
            split = replace(split, stage_of=split.stage_of[block_of])
        best = split or best
    return best


def _blocks(pieces: Pieces, order: IntArray) -> IntArray | None:
    """Blocks of about the same time that follow each other; None where there are few pieces."""
    if pieces.num_pieces <= _MAX_BLOCKS:
        return None
    seconds = np.where(np.isfinite(pieces.seconds), pieces.seconds, 0.0).max(axis=0)
    # Pieces without time would otherwise all fall into one block.
    seconds = seconds + max(float(seconds.sum()), 1e-12) / pieces.num_pieces
    after_s = np.cumsum(seconds[order])
    middle = (after_s - seconds[order] / 2) / after_s[-1]
    numbers = np.minimum(middle * _MAX_BLOCKS, _MAX_BLOCKS - 1)
    _, dense = np.unique(numbers.astype(np.int32), return_inverse=True)
    block_of = np.empty(pieces.num_pieces, dtype=np.int32)
    block_of[order] = dense
    return block_of


def _found(
    label: IntArray, classes: DeviceClasses, split: StageSplit, *, is_proven: bool
) -> FoundPlacement:
    # A graph without pieces has no stage.
    devices = classes.devices_of(split.class_of if len(split.class_of) else np.zeros(1, np.int32))
    return FoundPlacement(devices[split.stage_of[label]], devices, is_proven)


def _with_moved_boundaries(
    problem: Problem, pieces: Pieces, classes: DeviceClasses, found: FoundPlacement
) -> FoundPlacement:
    """Move pieces between neighbouring stages; devices without a stage come last."""
    num_devices = problem.cluster.num_devices
    unused = np.setdiff1d(np.arange(num_devices), found.devices)
    stage_of = np.empty(num_devices, dtype=np.int32)
    stage_of[np.concatenate((found.devices, unused))] = np.arange(num_devices, dtype=np.int32)
    limit_bytes = limits_by_device(problem, classes)
    num_tries = min(_BOUNDARY_MOVES.num_tries, _TRIES_PER_PIECE * pieces.num_pieces)
    heat = _BOUNDARY_MOVES._replace(num_tries=num_tries)
    moved = annealed(
        problem, pieces, found.device_of, heat, limit_bytes=limit_bytes, stage_of=stage_of
    )
    return FoundPlacement(moved.device_of, found.devices, False)


def limits_by_device(problem: Problem, classes: DeviceClasses) -> LongArray:
    """Bytes per device from those per class."""
    limit_bytes = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    for devices, limit in zip(classes.devices, classes.limit_bytes, strict=True):
        limit_bytes[devices] = limit
    return limit_bytes
