"""Local search: change a placement and its order where it affects the simulated step.

From any placement, moves that might shorten the critical path are evaluated, the most promising
first, and the first that is better is made (`climb`): first with units that the coarse graph keeps
together, then with as little as may be separated. Between the two a random walk (`anneal`) gets
away from plans whose every neighbour is worse; small graphs are walked through most of the time and
then searched move by move (`iterate`). A plan is better if devices lack less memory, then if its
step is shorter, then if it sends fewer bytes, so the result is never worse than what came in.
The number of evaluations falls with the size of the graph, so that time hardly grows with it.

The moves on the critical path follow ParDNN's refinement (Qararyah et al., 2021) and FAST (Kwok and
Ahmad, 1999), which move random critical nodes within a budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.graph.coarsen.groups import bound_ops
from hocket.graph.graph import Graph
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import placement_of
from hocket.planners.placement.coarse import default_units, fastest_s
from hocket.planners.placement.search.critical import find_critical
from hocket.planners.placement.search.moves import Move, moves
from hocket.planners.placement.search.state import Change, LocalSearch
from hocket.planners.placement.search.units import SearchUnits, units_of
from hocket.simulate.evaluate import Changes

# Clusters: a unit with some of the units around it, to be moved as one.
#
# Where transfers take long, moving one unit costs more than it gains, and only moving it together
# with what it exchanges tensors with shows whether another device would be better.


def neighbours(graph: Graph, units: SearchUnits) -> list[list[int]]:
    """Units that exchange tensors with each unit, ascending."""
    src, dst = (units.unit_of[ends].tolist() for ends in graph.edges)
    near: list[set[int]] = [set() for _ in range(units.num_units)]
    for one, other in zip(src, dst, strict=True):
        if one != other:
            near[one].add(other)
            near[other].add(one)
    return [sorted(found) for found in near]


def cluster(near: list[list[int]], start: int, random: np.random.Generator) -> list[int]:
    """A unit and connected units around it, of a log-uniform random size."""
    size = int(2 ** random.uniform(1, np.log2(max(len(near), 3))))
    picks = random.random(size).tolist()
    chosen, border = [start], list(near[start])
    seen = {start, *border}
    while border and len(chosen) < size:
        unit = border.pop(int(picks[len(chosen)] * len(border)))
        chosen.append(unit)
        fresh = [other for other in near[unit] if other not in seen]
        seen.update(fresh)
        border += fresh
    return chosen


# Iterated local search for small graphs: climb, disturb a little, climb again, keep the best.
#
# Here every move can be tried, not only those that the critical path suggests: each unit on each
# device, each op some places earlier or later on its device, and units with some of their
# neighbours, without which a search never leaves a plan whose transfers outweigh its ops. Devices
# are held to their order, so that one may also wait for an op that comes later although another is
# ready.
#
# Lourenço, Martin, Stützle, "Iterated local search", 2003.

_ITERATED_CHUNK = 48
"""Moves that are prepared at a time, based on the plan at that moment."""
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
        chunk = waiting[: min(_ITERATED_CHUNK, search.budget - stop_at, len(waiting) - failed)]
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
        """Changes to the current plan that the moves make."""
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


# Simulated annealing for small graphs: random moves, ever less willing to make the step longer.
#
# A search that only accepts better plans never leaves one whose every neighbour is worse, and in
# small graphs with long transfers many are like that. Moves are a unit to another device, a cluster
# of units to another device, and two ops that exchange their priorities. They are drawn beforehand,
# so that the whole walk is one call of compiled code. O(moves · simulation).
#
# Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated annealing", Science 1983.

_COOLING = 1 / 40
"""Final temperature of the walk, relative to its initial one."""
_UNITS, _CLUSTERS = 0.45, 0.25
"""Shares of moves that are of units and of clusters; the others exchange priorities."""
_NUM_CLUSTERS = 256


def anneal(
    search: LocalSearch,
    units: SearchUnits,
    num_moves: int,
    heat: float,
    random: np.random.Generator,
) -> None:
    """Walk from the present plan; ends with the best plan that was met.

    ``heat`` is the share of the step by which the first moves may make it longer, on average.
    """
    kind = random.random(num_moves)
    pool = _Pool(search, units, random)
    which = pool.draw(kind < _UNITS, random)
    is_exchange = kind >= _UNITS + _CLUSTERS
    which[is_exchange] = -1
    search.walk(pool.changes(which, _tolerances(num_moves, heat, random), random))


def _tolerances(num_moves: int, heat: float, random: np.random.Generator) -> FloatArray:
    """Metropolis' rule with its random numbers drawn first: how much longer a step may become."""
    cooled = heat * _COOLING ** (np.arange(num_moves) / max(num_moves - 1, 1))
    tolerances: FloatArray = 1 + cooled * random.exponential(size=num_moves)
    return tolerances


class _Pool:
    """Sets of ops that a walk moves, and the devices that each of them can go to."""

    def __init__(
        self, search: LocalSearch, units: SearchUnits, random: np.random.Generator
    ) -> None:
        self.num_ops, self.num_units = len(search.device_of), units.num_units
        near = neighbours(search.problem.graph, units)
        starts = random.integers(0, units.num_units, _NUM_CLUSTERS).tolist()
        members = [
            *([unit] for unit in range(units.num_units)),
            *(cluster(near, start, random) for start in starts),
        ]
        flat = np.array([unit for chosen in members for unit in chosen])
        first = pointers([len(chosen) for chosen in members])[:-1]
        self.ops, position = units.ops_of_all(flat)
        num_ops = np.bincount(position, minlength=len(flat))
        self.size: LongArray = np.add.reduceat(num_ops, first)
        self.first = np.cumsum(self.size) - self.size
        can_go = np.logical_and.reduceat(units.can_run[:, flat], first, axis=1).T
        self.target = np.argwhere(can_go)
        """Pairs of a set and a device; those of single units come first."""

    def draw(self, is_unit: np.ndarray, random: np.random.Generator) -> LongArray:
        """Positions in ``target``: of a unit where asked for, else of a cluster."""
        border = int(np.searchsorted(self.target[:, 0], self.num_units))
        is_unit = is_unit | (border == len(self.target))
        low, high = np.where(is_unit, 0, border), np.where(is_unit, border, len(self.target))
        return random.integers(low, high)

    def changes(
        self, which: LongArray, tolerance: FloatArray, random: np.random.Generator
    ) -> Changes:
        """The drawn moves; where ``which`` is -1, an exchange of priorities."""
        chosen, device = self.target[which].T
        is_exchange = which < 0
        size = np.where(is_exchange, 1, self.size[chosen])
        ptr = pointers(size)
        move = np.repeat(np.arange(len(which)), size)
        op = self.ops[self.first[chosen][move] + np.arange(len(move)) - ptr[move]]
        pairs = random.integers(0, self.num_ops, (len(which), 2))
        return Changes(
            ptr=ptr,
            op=np.where(is_exchange[move], pairs[move, 0], op),
            device=device[move],
            priority=np.full(len(move), np.nan),
            partner=np.where(is_exchange[move], pairs[move, 1], -1),
            tolerance=tolerance,
        )


# Climb: try the most promising moves, take the first that is better, look again.

_CHUNK = 16
_FRESH_ORDER = 4
"""After so many accepted moves a new order is tried."""

_Key = tuple[str, tuple[int | bytes, ...]]
"""Identity of a move: kind and key."""


@dataclass
class Luck:
    """Success counts per kind of move, so that kinds that worked are tried first."""

    tried: dict[str, int] = field(default_factory=dict)
    better: dict[str, int] = field(default_factory=dict)

    def ranking(self) -> Callable[[Move], tuple[float, tuple[int, ...]]]:
        """A key that puts first what gains most, times how often its kind works by now."""
        share = {
            kind: (1 + self.better.get(kind, 0)) / (1 + tried) for kind, tried in self.tried.items()
        }

        def key(move: Move) -> tuple[float, tuple[int, ...]]:
            works = share.get(move.kind, 1.0)
            expected_s = move.gain_s * works if move.gain_s > 0 else move.gain_s / works
            return -expected_s, move.place

        return key

    def count(self, moves: list[Move], found: int) -> None:
        """Learn from moves that were tried up to the one that was better (-1: none)."""
        for move in moves if found < 0 else moves[: found + 1]:
            self.tried[move.kind] = self.tried.get(move.kind, 0) + 1
        if found >= 0:
            kind = moves[found].kind
            self.better[kind] = self.better.get(kind, 0) + 1


def climb(search: LocalSearch, units: SearchUnits, budget: int) -> bool:
    """Accept better moves until none is found or ``budget`` evaluations are spent; whether any."""
    luck, tried = Luck(), dict[_Key, int]()
    stop_at = max(search.budget - budget, 0)
    num_accepted, num_since, look = 0, 0, 0
    while search.budget > stop_at:
        look += 1
        ranked = heapq.merge(
            *moves(search, units, find_critical(search, units)), key=luck.ranking()
        )
        found = _first_better(search, ranked, stop_at, luck, tried, look)
        if found:
            num_accepted, num_since = num_accepted + 1, num_since + 1
            if num_accepted % _FRESH_ORDER == 0 and not search.is_strict:
                search.try_fresh_order()
        elif num_since:
            # What failed before may work now that other things moved.
            tried.clear()
            num_since = 0
        else:
            break
    return num_accepted > 0


def _first_better(
    search: LocalSearch,
    ranked: Iterator[Move],
    stop_at: int,
    luck: Luck,
    tried: dict[_Key, int],
    look: int,
) -> bool:
    """Make the first move that is better, of those that were not tried in an earlier look."""
    fresh = (move for move in ranked if tried.get((move.kind, move.key), look) == look)
    while chunk := list(islice(fresh, max(0, min(_CHUNK, search.budget - stop_at)))):
        found = search.first_better([move.make() for move in chunk])
        luck.count(chunk, found)
        seen = chunk if found < 0 else chunk[: found + 1]
        tried.update(((move.kind, move.key), look) for move in seen)
        if found >= 0:
            return True
    return False


_SMALL = 64
"""Up to so many units every move is tried."""
_WORK = 2_400_000
"""Ops that are simulated in all, about: evaluations times the size of the graph."""
_MIN_EVALUATIONS, _MAX_EVALUATIONS = 10, 10_000
_FEW = 60
"""With fewer evaluations than this only coarse units are moved."""
_WALKS = 4
_HEAT, _GENTLE_HEAT = 0.1, 0.01
"""Initial temperatures: high for small graphs, low for large ones."""
_MOVES_PER_UNIT = 4
"""A walk with fewer moves than this is not worth its evaluations."""


def local_search(problem: Problem, plan: Plan, share: float = 1.0) -> Plan:
    """The plan made better by local search; the plan itself where nothing better was found.

    Needs a placement. Problems that require contiguous devices or throughput keep theirs.
    ``share`` scales the usual number of evaluations; a small share only shows the potential of a
    plan.
    """
    placement_of(plan)
    if problem.contiguous or problem.objective == "throughput" or problem.graph.num_ops == 0:
        return plan
    search = LocalSearch(problem, plan, num_evaluations(problem.graph.num_ops, share))
    before = search.score
    search.try_fresh_order()
    search.try_latest_starts()
    fine = units_of(problem, bound_ops(problem.graph))
    random = np.random.default_rng(problem.seed)
    if fine.num_units <= _SMALL:
        _search_small(search, fine, random)
    else:
        _search_large(search, fine, random)
    return search.result() if search.score < before else plan


def _search_small(search: LocalSearch, units: SearchUnits, random: np.random.Generator) -> None:
    climb(search, units, search.budget // 4)
    for walk in range(_WALKS):
        anneal(search, units, search.budget * 9 // 10 // (_WALKS - walk), _HEAT, random)
    iterate(search, units, search.budget, random)


def _search_large(search: LocalSearch, fine: SearchUnits, random: np.random.Generator) -> None:
    problem = search.problem
    coarse = units_of(problem, default_units(problem, fastest_s(problem)))
    if search.budget < _FEW:
        climb(search, coarse, search.budget)
        return
    climb(search, coarse, search.budget // 3)
    num_moves = search.budget // 2
    if num_moves >= _MOVES_PER_UNIT * coarse.num_units:
        anneal(search, coarse, num_moves, _GENTLE_HEAT, random)
    climb(search, fine, search.budget)


def num_evaluations(num_ops: int, share: float = 1.0) -> int:
    """Approximate number of plans that a search evaluates."""
    usual = np.clip(_WORK // num_ops, _MIN_EVALUATIONS, _MAX_EVALUATIONS)
    return max(int(usual * share), _MIN_EVALUATIONS)
