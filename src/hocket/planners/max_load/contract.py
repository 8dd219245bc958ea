"""Contract pieces for contiguous splits, keeping an optimum.

A contiguous split gives each piece a stage so that no precedence goes back to an earlier stage.
Four contractions keep at least one best split (idle: takes no time and no memory that matters):

- Pieces on a cycle of the precedence share a stage, so they become one.
- An idle piece that no net ties can stand on any stage between those before and after it. It leaves
  the precedence, which is closed over the gap, and is put back last.
- An idle piece with one neighbour in the precedence and one net, which ties that neighbour, joins
  it: the device that loses it pays no more and the one that gets it touched the net already.
- An idle piece v joins the only piece m before it (or after it) if a net ties just these two and
  costs as much as all other nets of v together: apart, both devices pay that net; together, neither
  does, and the one that loses v and the one that gets it pay at most those others instead.

Backward ops are in the pieces of their forward partners; those without one have been given the
mirrored precedence of what they read and feed (`pieces`), which is the reverse of the order in
which gradients flow. The first and third are those of Tarnawski et al., NeurIPS 2020.
O(joins · (neighbours + nets)), in Python: meant for some thousands of pieces.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.planners.max_load.pieces import Pieces, gathered, strong_components

_MAX_CLOSED_PAIRS = 16
"""A piece leaves the precedence only where closing the gap takes at most so many pairs."""


@dataclass(frozen=True, eq=False)
class Contracted:
    """Fewer pieces in topological order, and the way back."""

    pieces: Pieces
    label: IntArray
    """For each piece that was there before, its contracted one; -1 for those left out."""
    full: Pieces

    def stages(self, stage: IntArray) -> IntArray:
        """The stage of every piece that was there before, from those of the contracted ones."""
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
    """The pieces with every cycle of the precedence as one piece, and the way there."""
    label = strong_components(pieces.before, pieces.after, pieces.num_pieces)
    if int(label.max(initial=-1)) + 1 == pieces.num_pieces:
        return pieces, label
    return gathered(pieces, label, merge=merge), label


def contracted(pieces: Pieces, net_s: FloatArray, *, bytes_matter: bool) -> Contracted:
    """Contract acyclic pieces with ``net_s`` seconds per net, the same on all devices that pay."""
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


class _Contraction:
    """The pieces as sets that shrink: who is before and after whom, and who is in which net."""

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
        """Where each piece went: itself, the piece that it joined, or -1."""

    def run(self) -> IntArray:
        """Contract until nothing changes; for each piece the one that stands for it, or -1."""
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
        """What is left of the precedence, between ``number`` of each piece."""
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
        """The neighbour that an idle piece can join."""
        nets, before, after = self.nets[piece], self.before[piece], self.after[piece]
        neighbours = [next(iter(side)) for side in (before, after) if len(side) == 1]
        for other in neighbours:
            is_only_neighbour = len(before) + len(after) == 1 and len(nets) <= 1
            if is_only_neighbour and all(other in self.tied[net] for net in nets):
                return other
            pair = next((net for net in nets if self.tied[net] == {piece, other}), None)
            if pair is not None:
                rest_s = sum(self.net_s[net] for net in nets if net != pair)
                if self.net_s[pair] >= rest_s:
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
