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

# Contract pieces for contiguous splits, keeping an optimum.
#
# A contiguous split gives each piece a stage so that no precedence goes back to an earlier stage.
# Three contractions keep at least one best split (idle: takes no time and no memory that matters):
#
# - Pieces on a cycle of the precedence share a stage, so they become one.
# - An idle piece that no net ties can stand on any stage between those before and after it. It
#   leaves the precedence, which is closed over the gap, and is put back last.
# - An idle piece with one neighbour in the precedence and one net, which ties that neighbour, joins
#   it: the device that loses it pays no more and the one that gets it touched the net already.
#
# Backward ops are in the pieces of their forward partners; those without one have been given the
# mirrored precedence of their producers and readers (`load_pieces`), the reverse of the order in
# which gradients flow. The first and third are those of Tarnawski et al., NeurIPS 2020.
# O(joins · (neighbours + nets)), in Python: meant for some thousands of pieces.

_MAX_CLOSED_PAIRS = 16
"""Maximum number of precedence pairs added to close the gap of a piece that is left out."""


@dataclass(frozen=True, eq=False)
class Contracted:
    """Fewer pieces in topological order, and the mapping to the original ones."""

    pieces: Pieces
    label: IntArray
    """Per original piece: its contracted piece; -1 if it was left out."""
    full: Pieces

    def stages(self, stage: IntArray) -> IntArray:
        """Per original piece: its stage, given the stages of the contracted pieces."""
        found = np.zeros(len(self.label), dtype=np.int32)
        found[self.label >= 0] = stage[self.label[self.label >= 0]]
        left_out = np.flatnonzero(self.label < 0)
        if not len(left_out):
            return found
        into = np.isin(self.full.after, left_out)
        before_of: dict[int, list[int]] = {}
        for first, second in zip(self.full.before[into], self.full.after[into], strict=True):
            before_of.setdefault(int(second), []).append(int(first))
        for piece in depth_first_order(self.full).tolist():
            if self.label[piece] < 0:
                found[piece] = max((found[other] for other in before_of.get(piece, ())), default=0)
        return found


def acyclic(pieces: Pieces, *, merge: bool) -> tuple[Pieces, IntArray]:
    """Merge every precedence cycle into one piece; also returns the new piece of each old one."""
    label = strong_components(Edges(pieces.before, pieces.after), pieces.num_pieces)
    if int(label.max(initial=-1)) + 1 == pieces.num_pieces:
        return pieces, label
    return gathered(pieces, label, merge=merge), label


def contracted(pieces: Pieces, net_s: FloatArray, *, bytes_matter: bool) -> Contracted:
    """Contract acyclic pieces, with ``net_s`` seconds per net on all devices that pay for it."""
    idle = (pieces.seconds == 0).all(axis=0)
    if bytes_matter:
        idle &= pieces.memory_bytes == 0
    work = _Contraction(pieces, net_s, idle.tolist())
    label = work.run()
    kept = np.flatnonzero(label >= 0)
    number = np.full(pieces.num_pieces + 1, -1, dtype=np.int32)
    number[np.unique(label[kept])] = np.arange(len(np.unique(label[kept])))
    label = number[label]
    before, after = work.precedence(number)
    smaller = replace(gathered(pieces, label, merge=True), before=before, after=after)
    position = np.full(smaller.num_pieces + 1, -1, dtype=np.int32)
    position[depth_first_order(smaller)] = np.arange(smaller.num_pieces, dtype=np.int32)
    ordered = gathered(smaller, position[:-1], merge=True)
    return Contracted(ordered, position[label], pieces)


def depth_first_order(pieces: Pieces, *, latest_first: bool = True) -> IntArray:
    """Return a topological order that follows each branch to its end before the next.

    Of branches that become ready together, the last (``latest_first``) or the first comes first.
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


class _Contraction:
    """Pieces that are contracted step by step, with their precedence and nets."""

    def __init__(self, pieces: Pieces, net_s: FloatArray, idle: list[bool]) -> None:
        self.idle = idle
        self.before: list[set[int]] = [set() for _ in idle]
        self.after: list[set[int]] = [set() for _ in idle]
        for first, second in zip(pieces.before.tolist(), pieces.after.tolist(), strict=True):
            self.before[second].add(first)
            self.after[first].add(second)
        self.net_s = net_s.tolist()
        self.tied: list[set[int]] = []
        self.nets: list[set[int]] = [set() for _ in idle]
        bounds, members = pieces.net_ptr.tolist(), pieces.net_pieces.tolist()
        for net, seconds in enumerate(self.net_s):
            self.tied.append(set(members[bounds[net] : bounds[net + 1]]))
            for piece in self.tied[net] if seconds > 0 else ():
                self.nets[piece].add(net)
        self.went = list(range(len(idle)))
        """Per piece: itself, the piece that it joined, or -1 if left out."""

    def run(self) -> IntArray:
        """Contract until nothing changes; returns each piece's representative, -1 if left out."""
        todo = deque(piece for piece, is_idle in enumerate(self.idle) if is_idle)
        while todo:
            piece = todo.popleft()
            if self.went[piece] != piece:
                continue
            around = self.before[piece] | self.after[piece]
            target = self._partner(piece)
            if target is not None:
                self._join(piece, target)
            elif not self.nets[piece] and self._may_leave(piece):
                self._leave(piece)
            else:
                continue
            todo.extend(sorted(other for other in around if self.idle[other]))
        return np.array([self._found(piece) for piece in range(len(self.went))], dtype=np.int32)

    def precedence(self, number: IntArray) -> tuple[IntArray, IntArray]:
        """Return the remaining precedence, with pieces renumbered by ``number``."""
        pairs = [(p, q) for p in range(len(self.went)) if self.went[p] == p for q in self.after[p]]
        if not pairs:
            return np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32)
        first, second = np.array(sorted(pairs)).T
        return number[first], number[second]

    def _found(self, piece: int) -> int:
        while piece >= 0 and self.went[piece] != piece:
            piece = self.went[piece]
        return piece

    def _partner(self, piece: int) -> int | None:
        """Return the neighbour that an idle piece can join; None if there is none."""
        nets, before, after = self.nets[piece], self.before[piece], self.after[piece]
        neighbours = [next(iter(side)) for side in (before, after) if len(side) == 1]
        for other in neighbours:
            is_only_neighbour = len(before) + len(after) == 1 and len(nets) <= 1
            if is_only_neighbour and all(other in self.tied[net] for net in nets):
                return other
        return None

    def _join(self, piece: int, target: int) -> None:
        self._unhook(piece)
        self.went[piece] = target
        self.before[target] |= self.before[piece] - {target}
        self.after[target] |= self.after[piece] - {target}
        for other in self.before[piece] - {target}:
            self.after[other].add(target)
        for other in self.after[piece] - {target}:
            self.before[other].add(target)
        for net in self.nets[piece]:
            self.tied[net].discard(piece)
            self.tied[net].add(target)
            self.nets[target].add(net)
            if len(self.tied[net]) == 1:
                self.nets[target].discard(net)

    def _may_leave(self, piece: int) -> bool:
        return len(self.before[piece]) * len(self.after[piece]) <= _MAX_CLOSED_PAIRS

    def _leave(self, piece: int) -> None:
        self._unhook(piece)
        self.went[piece] = -1
        for first in self.before[piece]:
            self.after[first] |= self.after[piece]
        for second in self.after[piece]:
            self.before[second] |= self.before[piece]

    def _unhook(self, piece: int) -> None:
        for other in self.before[piece]:
            self.after[other].discard(piece)
        for other in self.after[piece]:
            self.before[other].discard(piece)


# Necks: the pieces that a model narrows to, where PipeDream may cut it.
#
# PipeDream (Narayanan et al., SOSP 2019) splits a chain of layers. A model with branches becomes a
# chain if everything between two pieces that no precedence passes by is one layer. Found in one
# walk over a topological order: a piece is a neck if no precedence starts before it and ends after
# it. O(pieces + precedence).


def neck_blocks(pieces: Pieces) -> IntArray:
    """Per piece (acyclic): its block, which begins at a neck and ends before the next.

    Pieces without precedence can be on either side of a neck or prevent it, so two depth-first
    orders are tried and the one with more necks is used.
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


def by_order(pieces: Pieces, classes: DeviceClasses, *, is_alike: bool) -> FoundPlacement | None:
    """DPL: return the best split over some topological orders; None if none fits."""
    shrunk, label = _shrunk(pieces, classes, is_alike=is_alike)
    split = _best_over_orders(shrunk.pieces, classes)
    return None if split is None else _found(shrunk, label, classes, split, is_proven=False)


def between_necks(
    pieces: Pieces, classes: DeviceClasses, *, is_alike: bool
) -> FoundPlacement | None:
    """PipeDream: return the best split that cuts only at necks; None if none fits."""
    shrunk, label = _shrunk(pieces, classes, is_alike=is_alike)
    block_of = neck_blocks(shrunk.pieces)
    blocks = gathered(shrunk.pieces, block_of, merge=is_alike)
    split = _best_over_orders(blocks, classes)
    if split is None:
        return None
    split = replace(split, stage_of=split.stage_of[block_of])
    return _found(shrunk, label, classes, split, is_proven=False)


def contiguous(pieces: Pieces, classes: DeviceClasses, *, is_alike: bool) -> FoundPlacement | None:
    """Return the best contiguous split found; None if none fits."""
    shrunk, label = _shrunk(pieces, classes, is_alike=is_alike)
    split = _best_over_orders(shrunk.pieces, classes)
    few = shrunk.pieces.num_pieces <= _MAX_CONTRACTED
    lattice = ideal_lattice(shrunk.pieces, _MAX_IDEALS) if few else None
    if lattice is not None:
        limit_s = np.inf if split is None else split.max_load_s * _HARDLY
        better = best_split(shrunk.pieces, classes, lattice, limit_s, _MAX_LOOKS)
        split = better.split or split
        if split is not None and better.is_complete and is_alike:
            return _found(shrunk, label, classes, split, is_proven=True)
    if split is None:
        return None
    return _found(shrunk, label, classes, split, is_proven=False)


def _shrunk(
    pieces: Pieces, classes: DeviceClasses, *, is_alike: bool
) -> tuple[Contracted, IntArray]:
    """Contract the pieces; also returns, per given piece, its piece before contraction (`full`)."""
    whole, label = acyclic(pieces, merge=is_alike)
    if is_alike and whole.num_pieces <= _MAX_CONTRACTED:
        bytes_matter = int(whole.memory_bytes.sum()) > int(classes.limit_bytes.min())
        return contracted(whole, classes.net_s(whole).max(axis=0), bytes_matter=bytes_matter), label
    return Contracted(whole, np.arange(whole.num_pieces, dtype=np.int32), whole), label


def _best_over_orders(pieces: Pieces, classes: DeviceClasses) -> StageSplit | None:
    """Return the best split over two depth-first orders and the pieces' own, if topological."""
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
    """Per piece: its block of consecutive pieces with about equal time; None if pieces are few."""
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
    shrunk: Contracted,
    label: IntArray,
    classes: DeviceClasses,
    split: StageSplit,
    *,
    is_proven: bool,
) -> FoundPlacement:
    # Where all pieces were left out there is no stage; they can run anywhere.
    devices = classes.devices_of(split.class_of if len(split.class_of) else np.zeros(1, np.int32))
    return FoundPlacement(devices[shrunk.stages(split.stage_of)[label]], is_proven)


def limits_by_device(problem: Problem, classes: DeviceClasses) -> LongArray:
    """Per device: the byte limit of its class."""
    limit_bytes = np.zeros(problem.cluster.num_devices, dtype=np.int64)
    for devices, limit in zip(classes.devices, classes.limit_bytes, strict=True):
        limit_bytes[devices] = limit
    return limit_bytes
