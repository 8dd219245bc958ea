"""Find the favourite child of each op of a problem."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.planners.placement.favourites.edges import Edges, edges_of, only_edges
from hocket.planners.placement.favourites.frank_wolfe import path_s, solve_nearly
from hocket.planners.placement.favourites.linear import solve_linear
from hocket.planners.placement.favourites.matching import round_shares

_MAX_LINEAR_EDGES = 5_000
"""Up to this many edges that are not alone on their ends, the relaxation is solved exactly."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Favourites:
    """Favourite children and what they were rounded from."""

    child: IntArray
    """Per op its favourite child, or -1; each op is the favourite of at most one."""
    spared_s: FloatArray
    """Per op: seconds of the transfer to its favourite child; 0 without one."""
    relaxed_s: float
    """The longest path with the shares that were rounded. Where `is_optimal`, no favourites on any
    number of equal devices make it shorter."""
    is_optimal: bool

    @property
    def count(self) -> int:
        """How many ops have a favourite child."""
        return int((self.child >= 0).sum())


def favourite_children(problem: Problem) -> IntArray:
    """Per op its favourite child, or -1; each op is the favourite of at most one."""
    return find_favourites(problem).child


def find_favourites(problem: Problem) -> Favourites:
    """Favourite children from the relaxation, solved exactly or nearly, by size."""
    edges = edges_of(problem)
    share = None
    if len(edges.src) - int(only_edges(edges).sum()) <= _MAX_LINEAR_EDGES:
        share = solve_linear(edges)
    is_optimal = share is not None
    share = solve_nearly(edges) if share is None else share
    child = round_shares(edges, share)
    return Favourites(
        child=child,
        spared_s=_spared_s(edges, child),
        relaxed_s=path_s(edges, share),
        is_optimal=is_optimal,
    )


def _spared_s(edges: Edges, child: IntArray) -> FloatArray:
    spared_s = np.zeros(len(child))
    chosen = np.flatnonzero(child[edges.src] == edges.dst)
    spared_s[edges.src[chosen]] = edges.cost_s[chosen]
    return spared_s
