"""Simulated annealing for small graphs: random moves, ever less willing to make the step longer.

A search that only accepts better plans never leaves one whose every neighbour is worse, and in
small graphs with long transfers many are like that. Moves are a unit to another device, a cluster
of units to another device, and two ops that exchange their priorities. They are drawn beforehand,
so that the whole walk is one call of compiled code. O(moves · simulation).

Kirkpatrick, Gelatt, Vecchi, "Optimization by simulated annealing", Science 1983.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.planners.placement.search.clusters import cluster, neighbours
from hocket.planners.placement.search.state import LocalSearch
from hocket.planners.placement.search.units import SearchUnits
from hocket.simulate.evaluate import Changes

_COOLING = 1 / 40
"""How much less willing the walk is at its end than at its start."""
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
