"""Iterated local search for small graphs: climb, disturb a little, climb again, keep the best.

Here every move can be tried, not only those that the critical path suggests: each unit on each
device, each op some places earlier or later on its device, and units with some of their neighbours,
without which a search never leaves a plan whose transfers outweigh its ops. Devices are held to
their order, so that one may also wait for an op that comes later although another is ready.

Lourenço, Martin, Stützle, "Iterated local search", 2003.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from hocket.planners.placement.search.clusters import cluster, neighbours
from hocket.planners.placement.search.state import Change, LocalSearch
from hocket.planners.placement.search.units import SearchUnits

_CHUNK = 48
"""Moves that are made ready at a time; they stand on the plan as it was then."""
_MAX_KICK = 3
_REACH = 6
"""An op is put at most so many places earlier or later on its device."""
_DRIFT = 1.05
"""The search goes on from a plan that is longer than the best by at most this factor."""


class _Kind(IntEnum):
    UNIT = 0
    """A unit to a device."""
    CLUSTER = 1
    """A unit and some of its neighbours to a device."""
    ORDER = 2
    """An op some places on."""


class _Move(NamedTuple):
    kind: _Kind
    which: int
    """Unit or op."""
    where: int
    """Device, or places to go."""


def iterate(
    search: LocalSearch, units: SearchUnits, budget: int, random: np.random.Generator
) -> None:
    """Search until the budget is spent; ends with the best plan that was seen."""
    stop_at = max(search.budget - budget, 0)
    around = _Around(search, units, random)
    search.make_strict()
    _descend(search, around, stop_at, random)
    best = present = search.snapshot()
    while search.budget > stop_at:
        search.jump(around.kick())
        _descend(search, around, stop_at, random)
        if search.score < best.score:
            best = search.snapshot()
        if search.score[:2] <= (best.score.overflow_bytes, best.score.step_s * _DRIFT):
            present = search.snapshot()
        else:
            search.restore(present)
    search.restore(best)


def _descend(
    search: LocalSearch, around: _Around, stop_at: int, random: np.random.Generator
) -> None:
    """First improvement over all moves in random order, until none is left."""
    waiting = [around.moves[index] for index in random.permutation(len(around.moves)).tolist()]
    failed = 0
    while failed < len(waiting) and search.budget > stop_at:
        chunk = waiting[: min(_CHUNK, search.budget - stop_at, len(waiting) - failed)]
        found = search.first_better(around.changes(chunk))
        tried = len(chunk) if found < 0 else found + 1
        waiting = waiting[tried:] + waiting[:tried]
        failed = failed + tried if found < 0 else 0


class _Around:
    """The plans that are one move away."""

    def __init__(
        self, search: LocalSearch, units: SearchUnits, random: np.random.Generator
    ) -> None:
        self.search, self.units, self.random = search, units, random
        self.ops = [units.ops_of(unit) for unit in range(units.num_units)]
        self.able = [np.flatnonzero(can_run).tolist() for can_run in units.can_run.T]
        self.near = neighbours(search.problem.graph, units)
        targets = [(unit, device) for unit, able in enumerate(self.able) for device in able]
        reach = [go for go in range(-_REACH, _REACH + 1) if go]
        self.moves = [
            *(_Move(_Kind.UNIT, unit, device) for unit, device in targets),
            *(_Move(_Kind.CLUSTER, unit, device) for unit, device in targets),
            *(_Move(_Kind.ORDER, op, go) for op in range(len(search.device_of)) for go in reach),
        ]

    def changes(self, moves: list[_Move]) -> list[Change]:
        """What the moves mean for the present plan."""
        sequence = np.argsort(self.search.priority, kind="stable")
        on = self.search.device_of[sequence]
        line_ups = [sequence[on == device].tolist() for device in range(len(self.units.can_run))]
        return [
            self._reordered(move.which, move.where, line_ups)
            if move.kind == _Kind.ORDER
            else self._moved(move)
            for move in moves
        ]

    def kick(self) -> list[Change]:
        """A few units, with some of their neighbours, to random devices."""
        count = int(self.random.integers(1, _MAX_KICK + 1))
        moves = []
        for unit in self.random.integers(0, len(self.ops), count).tolist():
            device = self.able[unit][int(self.random.integers(len(self.able[unit])))]
            moves.append(_Move(_Kind.CLUSTER, unit, device))
        return self.changes(moves)

    def _moved(self, move: _Move) -> Change:
        chosen = [move.which]
        if move.kind == _Kind.CLUSTER:
            around = cluster(self.near, move.which, self.random)
            chosen = [unit for unit in around if move.where in self.able[unit]]
        ops = np.concatenate([self.ops[unit] for unit in chosen])
        return Change(ops, np.full(len(ops), move.where))

    def _reordered(self, op: int, go: int, line_ups: list[list[int]]) -> Change:
        """An op so many places earlier or later on its device."""
        device = int(self.search.device_of[op])
        line_up = line_ups[device]
        target = line_up[min(max(line_up.index(op) + go, 0), len(line_up) - 1)]
        priority = self.search.priority[target] + (0.5 if go > 0 else -0.5)
        return Change(np.array([op]), np.array([device]), np.array([priority]))
