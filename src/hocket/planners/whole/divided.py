"""The expert's view of the same search: the best way of every division, replicas by stages.

Where `compare_whole` tells the best of each family, this tells the best of each number of replicas
and stages, whole or sharded, by the same simulations. O(ways).
"""

from __future__ import annotations

from hocket.plan.problem import Problem
from hocket.plan.sections import Shares
from hocket.planners.candidates import Candidate, Comparison
from hocket.planners.goal import ranked
from hocket.planners.placement.devices import workers
from hocket.planners.whole.bound import shares_bound
from hocket.planners.whole.budget import Budget
from hocket.planners.whole.compare import explained, titled, with_reason
from hocket.planners.whole.must import ANYTHING, Must
from hocket.planners.whole.search import shared_ways
from hocket.planners.whole.sharded import unequal_shards
from hocket.planners.whole.tables import tables_of
from hocket.planners.whole.travelling import by_priority


def compare_divided(problem: Problem, must: Must = ANYTHING, most: int = 10) -> Comparison:
    """The best way of each division, the shortest first."""
    problem = must.on(problem)
    tables, devices = tables_of(problem), workers(problem).tolist()
    budget = Budget(problem)
    if must.num_stages in (None, 1):
        unequal_shards(tables, devices, budget)
    ways = shared_ways(problem, budget, "time", must)
    best: dict[str, Candidate] = {}
    for way in ways:
        best.setdefault(_name(way), titled(_name(way), way))
    tried = list(best.values())[:most]
    tried += [titled(w.planner, w) for w in by_priority(problem, tried) if w.plan is not None]
    order = ranked(problem, tried, "time")
    counts = {"ways": len(budget.seen), "simulated": budget.num_simulated}
    bound = shares_bound(tables, devices)
    if not order:
        return Comparison(
            problem=problem, candidates=tuple(tried), chosen=None, bound=bound, counts=counts,
            why=must.unshareable(problem, ()) or "no division fits",
        )  # fmt: skip
    winner = tried[order[0]]
    others = [tried[i] for i in order[1:]]
    told = [with_reason(c, winner) if c is not winner else c for c in tried]
    return Comparison(
        problem=problem, candidates=tuple(told), chosen=order[0], bound=bound, counts=counts,
        why=explained(problem, winner, others, ways, "time"),
    )  # fmt: skip


def _name(way: Candidate) -> str:
    assert way.plan is not None
    return division_name(way.plan[Shares])


def division_name(shares: Shares) -> str:
    """``data 2 x pipeline 1``, as people write degrees."""
    stages = sorted({shares.num_stages(replica) for replica in shares.replicas})
    deep = " and ".join(map(str, stages))
    name = f"data {len(shares.replicas)} x pipeline {deep}"
    name += f" x tensor {shares.tensor}" if shares.tensor > 1 else ""
    return f"{name}, sharded" if shares.sharded else name
