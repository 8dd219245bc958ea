"""Local search: change a placement and its order where this affects the simulated step.

From any placement, moves that might shorten the critical path are evaluated, the most promising
first, and the first improvement is accepted (`climb`): first with the units of the coarse graph,
then with the smallest units that a legal plan may separate. In between, simulated annealing
(`anneal`) escapes from local optima; on small graphs it uses most evaluations. A plan is better if
devices lack less memory, then if its step is shorter, then if it sends fewer bytes, so the result
is never worse than the initial plan. The number of evaluations falls with the size of the graph, so
the search time hardly grows with it.

The moves on the critical path follow ParDNN's refinement (Qararyah et al., 2021) and FAST (Kwok and
Ahmad, 1999), which move random critical nodes within a budget.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.graph.coarsen.groups import bound_ops
from hocket.graph.graph import Graph
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import placement_of
from hocket.planners.placement.coarse import default_units, fastest_s
from hocket.planners.placement.local_search_moves import Move, find_critical, moves
from hocket.planners.placement.local_search_state import LocalSearch, SearchUnits, units_of
from hocket.simulate.evaluate import Changes

# Clusters: a unit with some of the units around it, to be moved as one.
#
# Where transfers take long, moving one unit costs more than it gains, and only moving it together
# with what it exchanges tensors with shows whether another device would be better.


def neighbours(graph: Graph, units: SearchUnits) -> list[list[int]]:
    """Per unit: the units with which it exchanges tensors, ascending."""
    src, dst = (units.unit_of[ends].tolist() for ends in graph.edges)
    near: list[set[int]] = [set() for _ in range(units.num_units)]
    for one, other in zip(src, dst, strict=True):
        if one != other:
            near[one].add(other)
            near[other].add(one)
    return [sorted(found) for found in near]


def cluster(near: list[list[int]], start: int, random: np.random.Generator) -> list[int]:
    """Return a unit and connected units around it; their number is log-uniformly random."""
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
"""Fractions of moves that move a unit or a cluster; the rest exchange two ops' priorities."""
_NUM_CLUSTERS = 256


def anneal(
    search: LocalSearch,
    units: SearchUnits,
    num_moves: int,
    heat: float,
    random: np.random.Generator,
) -> None:
    """Run simulated annealing from the current plan; the best plan found becomes the current one.

    ``heat`` is the initial temperature relative to the step: the mean relative increase that the
    first moves may cause.
    """
    kind = random.random(num_moves)
    pool = _Pool(search, units, random)
    which = pool.draw(kind < _UNITS, random)
    is_exchange = kind >= _UNITS + _CLUSTERS
    which[is_exchange] = -1
    search.walk(pool.changes(which, _tolerances(num_moves, heat, random), random))


def _tolerances(num_moves: int, heat: float, random: np.random.Generator) -> FloatArray:
    """Per move: factor by which it may lengthen the step, by Metropolis' rule, drawn in advance."""
    cooled = heat * _COOLING ** (np.arange(num_moves) / max(num_moves - 1, 1))
    # Accepting a rise below T times an exponential variable is Metropolis' rule, exp(-rise / T).
    tolerances: FloatArray = 1 + cooled * random.exponential(size=num_moves)
    return tolerances


class _Pool:
    """Sets of ops that annealing moves, and the devices to which each can move."""

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
        """(set, device) pairs that can be drawn; those of single units come first."""

    def draw(self, is_unit: np.ndarray, random: np.random.Generator) -> LongArray:
        """Draw positions in ``target``: a single unit's if ``is_unit``, else a cluster's."""
        border = int(np.searchsorted(self.target[:, 0], self.num_units))
        is_unit = is_unit | (border == len(self.target))
        low, high = np.where(is_unit, 0, border), np.where(is_unit, border, len(self.target))
        return random.integers(low, high)

    def changes(
        self, which: LongArray, tolerance: FloatArray, random: np.random.Generator
    ) -> Changes:
        """Return the drawn moves; where ``which`` is -1, two random ops exchange priorities."""
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
"""Number of accepted moves after which a new order of all ops is tried."""

_Key = tuple[str, tuple[int | bytes, ...]]
"""Identity of a move: its type and its key."""


@dataclass
class Luck:
    """Success counts per type of move, so that types that succeeded are tried first."""

    tried: dict[str, int] = field(default_factory=dict)
    better: dict[str, int] = field(default_factory=dict)

    def ranking(self) -> Callable[[Move], tuple[float, tuple[int, ...]]]:
        """Return a sort key: largest gain first, scaled by the success rate of the type of move."""
        # Laplace smoothing: types that were hardly tried count as successful and get a chance.
        share = {
            kind: (1 + self.better.get(kind, 0)) / (1 + tried) for kind, tried in self.tried.items()
        }

        def key(move: Move) -> tuple[float, tuple[int, ...]]:
            works = share.get(move.kind, 1.0)
            # Losses are divided, so that a low success rate makes them rank later, too.
            expected_s = move.gain_s * works if move.gain_s > 0 else move.gain_s / works
            return -expected_s, move.place

        return key

    def count(self, moves: list[Move], found: int) -> None:
        """Count the moves tried, up to the improvement at position ``found`` (-1: all failed)."""
        for move in moves if found < 0 else moves[: found + 1]:
            self.tried[move.kind] = self.tried.get(move.kind, 0) + 1
        if found >= 0:
            kind = moves[found].kind
            self.better[kind] = self.better.get(kind, 0) + 1


def climb(search: LocalSearch, units: SearchUnits, budget: int) -> bool:
    """Accept improving moves until none is found or ``budget`` evaluations are spent.

    Returns True if a move was accepted.
    """
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
            # Moves that failed before may succeed after the moves accepted since then.
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
    """Accept the first improving move among those not tried in an earlier round of `climb`."""
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
"""Number of units up to which most evaluations are spent on annealing."""
_WORK = 2_400_000
"""Approximate number of op simulations in all: evaluations times ops of the graph."""
_MIN_EVALUATIONS, _MAX_EVALUATIONS = 10, 10_000
_FEW = 60
"""Number of evaluations below which only coarse units are moved."""
_WALKS = 4
_HEAT, _GENTLE_HEAT = 0.1, 0.01
"""Initial temperatures relative to the step: for small graphs, for large ones."""
_MOVES_PER_UNIT = 4
"""Minimum annealing moves per unit; with fewer, annealing is skipped."""


def local_search(problem: Problem, plan: Plan, share: float = 1.0) -> Plan:
    """Improve a plan by local search; returns the given plan if nothing better is found.

    The plan must have a placement. It is returned unchanged if the problem requires contiguous
    devices or maximises throughput. ``share`` scales the default number of evaluations; a small
    value only shows a plan's potential.
    """
    # Raises an error if the plan has no placement.
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
        # Each walk gets an equal part of what is left, except for a tenth for the last climb.
        anneal(search, units, search.budget * 9 // 10 // (_WALKS - walk), _HEAT, random)
    climb(search, units, search.budget)


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
    """Approximate number of plans that a search evaluates; ``share`` scales the default."""
    usual = np.clip(_WORK // num_ops, _MIN_EVALUATIONS, _MAX_EVALUATIONS)
    return max(int(usual * share), _MIN_EVALUATIONS)
