"""Favourite children: a relaxation of "one favourite each" is solved, swept and made whole.

Hanen and Munier (1995), as used by Jeon et al., "Baechi", SoCC 2020: if every op could keep one of
its readers on its own device, and every op follow one of its producers, which pairs would make the
longest path shortest? Small problems go to a linear programme, large ones to a descent that comes
within half a percent of it. Favours that no long path needs are then given up, because a device
that waits for a favourite to no end only loses time, and what is left becomes a matching.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.planners.favourites.descent import descended_favours
from hocket.planners.favourites.linear import optimal_favours
from hocket.planners.favourites.matching import match_favourites
from hocket.planners.favourites.net import net_of
from hocket.planners.favourites.sweep import longest_path_s, needed_favours

_MAX_LINEAR_EDGES = 3_000
"""Up to as many open edges the linear programme takes less than half a second."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Favourites:
    """Which reader should follow each op on the same device."""

    child: IntArray
    """Per op: its favourite child, or -1; no op is the favourite of two."""
    need: FloatArray
    """Per op: the favour, from 0 to 1, that long paths need of its favourite child."""
    spared_s: FloatArray
    """Per op: mean seconds of the transfer to its favourite child; 0 without one."""
    path_s: float
    """Longest path of the relaxation, in which an op may divide its favour among its readers."""
    method: str
    """How the relaxation was solved: ``linear programme`` or ``descent``."""


def favourite_children(problem: Problem) -> Favourites:
    """The favourite children of the ops of a problem."""
    net = net_of(problem)
    favour, method = None, "linear programme"
    if net.is_open.sum() <= _MAX_LINEAR_EDGES:
        favour = optimal_favours(net)
    if favour is None:
        favour, method = descended_favours(net), "descent"
    needed = needed_favours(net, favour)
    favour = np.where(net.is_free, 1.0, needed)
    child = match_favourites(net, favour)
    chosen = np.flatnonzero(child[net.src] == net.dst)
    need, spared_s = np.zeros((2, len(child)))
    need[net.src[chosen]], spared_s[net.src[chosen]] = needed[chosen], net.cost_s[chosen]
    path_s = longest_path_s(net, favour)
    return Favourites(child=child, need=need, spared_s=spared_s, path_s=path_s, method=method)
