"""Local search: change a placement and its order where the simulated step says that it matters.

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

import numpy as np

from hocket.graph.coarsen.groups import bound_ops
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import placement_of
from hocket.planners.placement.coarse import default_units, fastest_s
from hocket.planners.placement.search.annealing import anneal
from hocket.planners.placement.search.climb import climb
from hocket.planners.placement.search.iterated import iterate
from hocket.planners.placement.search.state import LocalSearch
from hocket.planners.placement.search.units import SearchUnits, units_of

_SMALL = 64
"""Up to so many units every move is tried."""
_WORK = 2_400_000
"""Ops that are simulated in all, about: evaluations times the size of the graph."""
_MIN_EVALUATIONS, _MAX_EVALUATIONS = 10, 10_000
_FEW = 60
"""With fewer evaluations than this only coarse units are moved."""
_WALKS = 4
_HEAT, _GENTLE_HEAT = 0.1, 0.01
"""How willing walks are at first: small graphs are explored, large ones only shaken."""
_MOVES_PER_UNIT = 4
"""A walk with fewer moves than this is not worth its evaluations."""


def local_search(problem: Problem, plan: Plan, share: float = 1.0) -> Plan:
    """The plan made better by local search; the plan itself where nothing better was found.

    Needs a placement. Problems that ask for contiguous devices or for throughput keep theirs. With
    a ``share`` of the usual number of evaluations the search is a look at what a plan promises.
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
    """How many plans a search looks at, about."""
    usual = np.clip(_WORK // num_ops, _MIN_EVALUATIONS, _MAX_EVALUATIONS)
    return max(int(usual * share), _MIN_EVALUATIONS)
