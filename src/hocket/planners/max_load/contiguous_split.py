"""Contiguous splits: the best over a few orders, then over all splits if the search is feasible.

First DPL (Tarnawski et al., NeurIPS 2020): the pieces in a depth-first topological order, cut into
stages by dynamic programming; several orders are tried. Then the same dynamic programme over all
ideals, limited by DPL's load. It proves the optimum among splits whose devices can be ordered so
that forward tensors never go to an earlier device (and gradients of ops without a forward partner
never to a later one). If there are too many ideals, the split of the best order is the result.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, positions
from hocket.graph.coarsen.contract import Edges, strong_components
from hocket.plan.problem import Problem
from hocket.planners.max_load.device_classes import DeviceClasses
from hocket.planners.max_load.load_pieces import Pieces, gathered
from hocket.planners.max_load.stage_split import (
    StageSplit,
    best_split,
    chain_lattice,
    ideal_lattice,
)

# Contract pieces for contiguous splits, keeping an optimum (Tarnawski et al., NeurIPS 2020).
#
# A contiguous split gives each piece a stage so that no precedence goes back to an earlier stage.
# Two contractions keep at least one best split (idle: takes no time and no memory that matters):
#
# - Pieces on a cycle of the precedence share a stage, so they become one.
# - An idle piece with one neighbour in the precedence and one net, which ties that neighbour, joins
#   it: the device that loses it pays no more and the one that gets it touched the net already.
#
# Backward ops are in the pieces of their forward partners; those without one have been given the
# mirrored precedence of their producers and readers (`load_pieces`), the reverse of the order in
# which gradients flow. O(pieces + nets), in Python: meant for some thousands of pieces.


def acyclic(pieces: Pieces) -> tuple[Pieces, IntArray]:
    """Merge every precedence cycle into one piece; also returns the new piece of each old one."""
    label = strong_components(Edges(pieces.before, pieces.after), pieces.num_pieces)
    if int(label.max(initial=-1)) + 1 == pieces.num_pieces:
        return pieces, label
    return gathered(pieces, label), label


def contracted(pieces: Pieces, net_s: FloatArray, *, bytes_matter: bool) -> tuple[Pieces, IntArray]:
    """Join idle pieces of acyclic ``pieces`` to their only neighbour, and sort the result.

    ``net_s`` are seconds per net on all devices that pay for it. Also returns the new piece of each
    old one.
    """
    joined_to = _joined_to(pieces, net_s, bytes_matter=bytes_matter)
    _, label = np.unique(joined_to, return_inverse=True)
    smaller = gathered(pieces, label.astype(np.int32))
    position = positions(depth_first_order(smaller)).astype(np.int32)
    return gathered(smaller, position), position[label]


def _joined_to(pieces: Pieces, net_s: FloatArray, *, bytes_matter: bool) -> IntArray:
    """Per piece: the piece that it joins; itself if none."""
    idle = (pieces.seconds == 0).all(axis=0)
    if bytes_matter:
        idle &= pieces.memory_bytes == 0
    near: list[set[int]] = [set() for _ in idle]
    for first, second in zip(pieces.before.tolist(), pieces.after.tolist(), strict=True):
        near[first].add(second)
        near[second].add(first)
    tied = [set(members.tolist()) for members in np.split(pieces.net_pieces, pieces.net_ptr[1:-1])]
    nets: list[set[int]] = [set() for _ in idle]
    for net in np.flatnonzero(net_s > 0).tolist():
        for piece in tied[net]:
            nets[piece].add(net)
    target = np.arange(pieces.num_pieces, dtype=np.int32)
    todo = deque(np.flatnonzero(idle).tolist())
    while todo:
        # Each join may leave the neighbour idle with one neighbour itself, hence the queue.
        piece = todo.popleft()
        if len(near[piece]) != 1 or len(nets[piece]) > 1:
            continue
        (other,) = near[piece]
        if any(other not in tied[net] for net in nets[piece]):
            continue
        target[piece] = other
        near[piece].clear()
        near[other].discard(piece)
        for net in nets[piece]:
            tied[net].discard(piece)
            if len(tied[net]) == 1:
                nets[other].discard(net)
        if idle[other]:
            todo.append(other)
    # Targets may have joined others in turn: follow the chains to their ends.
    while not np.array_equal(further := target[target], target):
        target = further
    return target


def depth_first_order(pieces: Pieces, *, latest_first: bool = True) -> IntArray:
    """Return a topological order that follows each branch to its end before the next.

    If several branches become ready together, the last (``latest_first``) or the first comes first.
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
# it. Precedence of a first or last piece that takes no time and ties nothing is not counted: such a
# piece (an initial state that all time steps read) costs nothing on any device. O(pieces +
# precedence).


def neck_blocks(pieces: Pieces, net_s: FloatArray) -> IntArray:
    """Per piece (acyclic): its block, which begins at a neck and ends before the next.

    Pieces without precedence can be on either side of a neck or prevent it, so two depth-first
    orders are tried and the one with more necks is used. ``net_s`` are seconds per net.
    """
    is_free = (pieces.seconds == 0).all(axis=0)
    is_free[pieces.net_pieces[np.repeat(net_s > 0, np.diff(pieces.net_ptr))]] = False
    is_idle = is_free[pieces.before] & ~np.isin(pieces.before, pieces.after)
    is_idle |= is_free[pieces.after] & ~np.isin(pieces.after, pieces.before)
    counted = np.flatnonzero(~is_idle)
    orders = (depth_first_order(pieces, latest_first=latest) for latest in (True, False))
    return max(
        (_necks_blocks(pieces, order, counted) for order in orders),
        key=lambda block_of: block_of.max(initial=-1),
    )


def _necks_blocks(pieces: Pieces, order: IntArray, counted: LongArray) -> IntArray:
    position = positions(order)
    # A difference array: +1 behind each precedence's start, -1 at its end.
    passing = np.zeros(pieces.num_pieces + 1, dtype=np.int64)
    np.add.at(passing, position[pieces.before[counted]] + 1, 1)
    np.add.at(passing, position[pieces.after[counted]], -1)
    is_neck = np.cumsum(passing)[:-1] == 0
    block_of = np.empty(pieces.num_pieces, dtype=np.int32)
    # The first piece of an order is never passed by, so blocks count from 0.
    block_of[order] = np.cumsum(is_neck) - 1
    return block_of


# Contraction works on Python sets, one per piece and net.
_MAX_CONTRACTED = 5000
"""Number of pieces above which contracting and listing ideals would take longer than they save."""
_MAX_IDEALS = 60_000
_MAX_LOOKS = 200_000_000
"""Limit on stages that the exact search evaluates, about 10 s."""
_MAX_BLOCKS = 800
"""Number of pieces above which an order is cut only between blocks of pieces."""
_HARDLY = 1 - 1e-9
"""Factor on DPL's load: the exact search looks for gains larger than rounding only."""


@dataclass(frozen=True, eq=False)
class FoundPlacement:
    """A placement of pieces, proven optimal or not."""

    device_of: IntArray
    """Per piece: its device."""
    is_proven: bool
    """True if no contiguous split has a smaller maximum load."""


def by_order(pieces: Pieces, classes: DeviceClasses) -> FoundPlacement | None:
    """DPL: return the best split over some topological orders; None if none fits."""
    shrunk, label = _shrunk(pieces, classes)
    split = _best_over_orders(shrunk, classes)
    return None if split is None else _found(label, classes, split)


def between_necks(pieces: Pieces, classes: DeviceClasses) -> FoundPlacement | None:
    """PipeDream: return the best split at points where the graph narrows to one piece.

    The blocks between these points come from `neck_blocks`; None if no split fits.
    """
    shrunk, label = _shrunk(pieces, classes)
    block_of = neck_blocks(shrunk, classes.net_s(shrunk).max(axis=0))
    split = _best_over_orders(gathered(shrunk, block_of), classes)
    return None if split is None else _found(block_of[label], classes, split)


def contiguous(pieces: Pieces, classes: DeviceClasses) -> FoundPlacement | None:
    """Return the best contiguous split found; None if none fits."""
    shrunk, label = _shrunk(pieces, classes)
    split, is_complete = _best_over_orders(shrunk, classes), False
    # The limit prunes the exact search, so the heuristic's load has to be known first.
    few = shrunk.num_pieces <= _MAX_CONTRACTED
    lattice = ideal_lattice(shrunk, _MAX_IDEALS) if few else None
    if lattice is not None:
        limit_s = np.inf if split is None else split.max_load_s * _HARDLY
        better = best_split(shrunk, classes, lattice, limit_s, _MAX_LOOKS)
        # If links differ, merged nets are not exact, so completeness proves nothing.
        split, is_complete = better.split or split, better.is_complete
    if split is None:
        return None
    return replace(_found(label, classes, split), is_proven=is_complete and pieces.is_alike)


def _shrunk(pieces: Pieces, classes: DeviceClasses) -> tuple[Pieces, IntArray]:
    """Return fewer pieces without cycles, contracted if that is exact, and each piece's new one."""
    # Bytes need no care if even the smallest device could hold all pieces.
    whole, label = acyclic(pieces)
    if not whole.is_alike or whole.num_pieces > _MAX_CONTRACTED:
        return whole, label
    bytes_matter = int(whole.memory_bytes.sum()) > int(classes.limit_bytes.min())
    net_s = classes.net_s(whole).max(axis=0)
    shrunk, position = contracted(whole, net_s, bytes_matter=bytes_matter)
    return shrunk, position[label]


def _best_over_orders(pieces: Pieces, classes: DeviceClasses) -> StageSplit | None:
    """Return the best split over two depth-first orders and the pieces' own, if topological."""
    orders = [depth_first_order(pieces), depth_first_order(pieces, latest_first=False)]
    if np.all(pieces.before < pieces.after):
        orders.append(np.arange(pieces.num_pieces, dtype=np.int32))
    best: StageSplit | None = None
    for order in orders:
        block_of = _blocks(pieces, order)
        blocks = pieces if block_of is None else gathered(pieces, block_of)
        chain = order if block_of is None else np.arange(blocks.num_pieces, dtype=np.int32)
        limit_s = np.inf if best is None else best.max_load_s
        split = best_split(blocks, classes, chain_lattice(chain), limit_s, _MAX_LOOKS).split
        if split is not None and block_of is not None:
            split = replace(split, stage_of=split.stage_of[block_of])
        best = split or best
    return best


def _blocks(pieces: Pieces, order: IntArray) -> IntArray | None:
    """Per piece: its block of consecutive pieces with about equal time; None if pieces are few."""
    if pieces.num_pieces <= _MAX_BLOCKS:
        return None
    seconds = np.where(np.isfinite(pieces.seconds), pieces.seconds, 0.0).max(axis=0)
    # A piece belongs to the block that contains the middle of its time.
    # Pieces without time would otherwise all fall into one block.
    seconds = seconds + max(float(seconds.sum()), 1e-12) / pieces.num_pieces
    after_s = np.cumsum(seconds[order])
    middle = (after_s - seconds[order] / 2) / after_s[-1]
    numbers = np.minimum(middle * _MAX_BLOCKS, _MAX_BLOCKS - 1)
    _, dense = np.unique(numbers.astype(np.int32), return_inverse=True)
    block_of = np.empty(pieces.num_pieces, dtype=np.int32)
    block_of[order] = dense
    return block_of


def _found(label: IntArray, classes: DeviceClasses, split: StageSplit) -> FoundPlacement:
    """Return the placement of a split, given the split's piece of each piece."""
    devices = classes.devices_of(split.class_of)
    return FoundPlacement(devices[split.stage_of[label]], is_proven=False)


def limits_by_device(problem: Problem, classes: DeviceClasses) -> LongArray:
    """Per device: the byte limit of its class."""
    limit_bytes = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    for devices, limit in zip(classes.devices, classes.limit_bytes, strict=True):
        limit_bytes[devices] = limit
    return limit_bytes
