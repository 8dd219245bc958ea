"""auto: run a portfolio of planners, improve the best plans, and keep the best of all.

No placement algorithm is best on every graph, and the order in which a device runs its ops matters
as much as the placement. So every planner of the portfolio proposes a placement. All of them, or as
many of the best as the budget allows, are tried with every order; placements that lack memory are
repaired; a local search briefly explores the most promising ones, continues from those that gain
most and finally from the best, until a plan is proven to be the shortest. For tiny graphs every
plan is tried. All plans are simulated, and every proposal is a candidate for the result, so the
result is never worse than any of them.

Cost: the sum of the planners, and a number of simulations that decreases with the size of the
graph. `effort_for` defines the budget: planners and orders by graph size. Of all local searches
that a user could request, only the most promising are run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.bounds import lower_bound
from hocket.planners.candidates import Candidate, empty_plan, judge, propose
from hocket.planners.order import best_order
from hocket.planners.placement.exact import (
    MAX_RUNS,
    can_be_tried,
    is_tiny,
    try_all,
)
from hocket.planners.placement.local_search import local_search, num_evaluations
from hocket.planners.placement.longest_path_order import by_longest_path
from hocket.planners.registry import (
    BASE,
    CUTS,
    FINE,
    FURTHER,
    LAST_RESORT,
    LATENCY_PORTFOLIO,
    RELIEF,
    SLOW,
    THROUGHPUT_PORTFOLIO,
)
from hocket.planners.shared import Planner

AUTO = "auto"


_ORDER_WORK = 4_000_000
"""Approximate number of ops simulated in total to try orders."""
_RUNS_PER_PLACEMENT = 12
"""Approximate number of simulations to try all orders of a placement."""
_SMALL_OPS = 64
"""Number of ops up to which slow search planners (`SLOW`) propose too, for about a second.

On larger graphs they take longer, their plans are twice as long as others, and local searches
achieve more in the same time.
"""
_LARGE_OPS = 5_000
"""Number of ops up to which `CUTS` planners propose too and several rounds of search run.

Searches then start from placements that do not depend on the order of ops in the file.
"""
_SEARCH_WORK = 5_000_000
"""Approximate number of ops simulated in full local searches: two of them, more on small graphs."""
_MOST_REPAIRED = 2
"""Maximum number of placements repaired that lack memory but would be the fastest."""
_LONGEST_SEARCH = 3.0
"""Maximum length of a search relative to a full one, for the smallest graphs.

Their simulations are so fast that searches can continue.
"""
_MOST_SEARCHES = 12
"""Maximum number of full searches; more planners seldom propose different placements."""
_EXACT = 1e-9
"""Relative distance from the lower bound up to which a step counts as the shortest."""
_ALL = 1_000


@dataclass(frozen=True)
class Effort:
    """Budget of work, by the size of the graph."""

    names: tuple[str, ...]
    """Planners that propose placements."""
    ordered: int
    """Number of placements that are tried with every order."""
    searches: tuple[tuple[int, float], ...] = ()
    """Rounds of local search: number of initial plans, and evaluations relative to the default."""


def effort_for(problem: Problem) -> Effort:
    """Return the budget, smaller for large graphs, where planners and simulations take long."""
    num_ops = problem.graph.num_ops
    if problem.objective == "throughput":
        return Effort(THROUGHPUT_PORTFOLIO, ordered=0)
    ordered = max(1, _ORDER_WORK // (_RUNS_PER_PLACEMENT * max(num_ops, 1)))
    names: tuple[str, ...]
    if num_ops <= _LARGE_OPS:
        slow = SLOW if num_ops <= _SMALL_OPS else ()
        names = (*LATENCY_PORTFOLIO, *FURTHER, *CUTS, *slow, LAST_RESORT)
        # Simulations of small graphs are so fast that longer searches cost little.
        share = min(max(_SMALL_OPS / max(num_ops, 1), 1.0), _LONGEST_SEARCH)
        whole = int(_SEARCH_WORK // max(num_ops * num_evaluations(max(num_ops, 1), share), 1))
        rounds = ((8, 1 / 16), (4, 1 / 8), (min(whole, _MOST_SEARCHES), share), (1, share))
        return Effort(names, ordered=_ALL, searches=rounds)
    if num_ops <= 50_000:
        names = (*LATENCY_PORTFOLIO, *FURTHER, LAST_RESORT)
        return Effort(names, ordered=ordered, searches=((4, 1 / 4), (1, 1.0)))
    return Effort((*LATENCY_PORTFOLIO, *FINE), ordered=ordered, searches=((1, 1.0),))


def auto(problem: Problem, plan: Plan) -> Plan:
    """Return the best plan of the portfolio; if nothing fits, the one that lacks least memory."""
    best = portfolio(problem)[-1]
    assert best.plan is not None, "the portfolio ends with a plan"
    return replace(best.plan, planner=plan.planner or AUTO)


def portfolio(problem: Problem, known: Sequence[Candidate] = ()) -> list[Candidate]:
    """Candidates of all planners in the portfolio, followed by the candidate of ``auto``.

    Candidates in ``known`` are reused instead of running their planners again. Raises
    `NoFeasiblePlanError` if no planner returns any plan, not even one that lacks memory.
    """
    started = time.perf_counter()
    effort = effort_for(problem)
    by_name = {candidate.planner: candidate for candidate in known}
    proposed = [by_name.get(name) or propose(problem, name, BASE[name]) for name in effort.names]
    # Nothing fits: the planner that was made for little memory gets a chance on large graphs, too.
    if not any(c.feasible for c in proposed) and LAST_RESORT not in effort.names:
        proposed.append(propose(problem, LAST_RESORT, BASE[LAST_RESORT]))
    refined = _refined(problem, proposed, effort) if effort.ordered else []
    placed = [candidate for candidate in (*proposed, *refined) if candidate.plan is not None]
    if not placed:
        raise NoFeasiblePlanError(
            proposed[-1].reason, hint="add a device of a kind that can run it"
        )
    best = min(placed, key=_rank(problem))
    seconds = time.perf_counter() - started
    return [*proposed, replace(best, planner=AUTO, plan=_named(best), plan_seconds=seconds)]


def _refined(problem: Problem, proposed: list[Candidate], effort: Effort) -> list[Candidate]:
    """Make further candidates from the best proposals: orders, repairs, exact and local search."""
    rank = _rank(problem)
    # Different planners often propose the same placement, which needs only one try.
    found = _of_each(sorted((c for c in proposed if c.plan is not None), key=rank), _placement)
    ordered = [_ordered(problem, candidate) for candidate in found[: effort.ordered]]
    pool = sorted([*found, *ordered], key=rank)
    relieved = [_improved(problem, c, BASE[RELIEF], RELIEF) for c in _worth_repair(pool)]
    pool = sorted([*pool, *relieved], key=rank)
    spread = BASE["spread-memory"]
    repaired = [_improved(problem, c, spread, "spread-memory") for c in _worth_repair(pool)]
    repaired = [*relieved, *repaired]
    # Local and exact search ignore contiguity, so they are of no use here.
    if problem.contiguous:
        return [*ordered, *repaired]
    fitting = [candidate for candidate in (*pool, *repaired) if candidate.feasible]
    exact, is_proven = _tried_all(problem, fitting) if is_tiny(problem) else ([], False)
    searched = [] if is_proven else _searched(problem, [*fitting, *exact], effort)
    if can_be_tried(problem) and not is_tiny(problem):
        # After a search few placements can still be better, so the exact search is short.
        exact, _ = _tried_all(problem, [*fitting, *searched])
    return [*ordered, *repaired, *exact, *searched]


def _searched(problem: Problem, fitting: list[Candidate], effort: Effort) -> list[Candidate]:
    """Candidates from rounds of local search, each started from the best candidates so far."""
    searched: list[Candidate] = []
    shortest_s = lower_bound(problem).seconds * (1 + _EXACT)
    for num_starts, share in effort.searches:
        if min((c.step_s for c in (*fitting, *searched) if c.step_s), default=np.inf) <= shortest_s:
            break
        ranked = sorted([*fitting, *searched], key=_rank(problem))
        # Starts with one origin end in similar plans, so each origin gets one search.
        starts = _of_each(_of_each(ranked, _origin), _placement)[:num_starts]
        search = by_longest_path(partial(local_search, share=share))
        searched += [_improved(problem, start, search, "local-search") for start in starts]
    return searched


def _tried_all(problem: Problem, known: list[Candidate]) -> tuple[list[Candidate], bool]:
    """Run the exact search; returns a better candidate if found, and whether it was complete."""
    known_s = min((c.step_s for c in known if c.step_s is not None), default=np.inf)
    answer = try_all(problem, empty_plan(problem, AUTO), MAX_RUNS, known_s)
    found = [] if answer.plan is None else [judge(problem, "all plans", answer.plan, 0.0)]
    return found, answer.is_complete


def _ordered(problem: Problem, candidate: Candidate) -> Candidate:
    assert candidate.plan is not None
    plan = by_longest_path(best_order)(problem, candidate.plan)
    return judge(problem, f"{candidate.planner} + {plan.claims.order}", plan, 0.0)


def _improved(problem: Problem, start: Candidate, planner: Planner, name: str) -> Candidate:
    assert start.plan is not None
    label = start.planner if start.planner.endswith(name) else f"{start.planner} + {name}"
    return judge(problem, label, planner(problem, start.plan), 0.0)


def _worth_repair(ranked: list[Candidate]) -> list[Candidate]:
    """Candidates that lack memory but would be faster than all that fit.

    If nothing fits, the candidate that lacks the fewest bytes.
    """
    best_s = min((c.step_s for c in ranked if c.step_s is not None), default=np.inf)
    lacking = [c for c in ranked if not c.feasible and c.timeline is not None]
    if np.isinf(best_s):
        return lacking[:1]  # nothing fits: repair only the plan that lacks least
    faster = [c for c in lacking if c.timeline is not None and c.timeline.makespan_s < best_s]
    return sorted(faster, key=lambda c: c.timeline.makespan_s if c.timeline else 0.0)[
        :_MOST_REPAIRED
    ]


def _of_each(
    candidates: Iterable[Candidate], key: Callable[[Candidate], object]
) -> list[Candidate]:
    """Return the first candidate for each value of ``key``."""
    first: dict[object, Candidate] = {}
    for candidate in candidates:
        first.setdefault(key(candidate), candidate)
    return list(first.values())


def _placement(candidate: Candidate) -> bytes:
    assert candidate.plan is not None
    assert candidate.plan.device_of is not None
    return candidate.plan.device_of.tobytes()


def _origin(candidate: Candidate) -> str:
    """Name of a candidate's first planner: searches that start from it end in similar plans."""
    return candidate.planner.split(" + ")[0]


def _rank(problem: Problem) -> Callable[[Candidate], tuple[float, float]]:
    """Sort key of candidates: by value; plans that do not fit come last, by missing bytes."""

    def key(candidate: Candidate) -> tuple[float, float]:
        value_s = candidate.value_s
        if value_s is not None:
            return 0.0, value_s
        assert candidate.timeline is not None
        over = np.maximum(candidate.timeline.peak_bytes - problem.memory_bytes, 0)
        return 1.0 + float(over.sum()), candidate.timeline.makespan_s

    return key


def _named(best: Candidate) -> Plan:
    assert best.plan is not None
    return replace(best.plan, planner=AUTO).claiming(made_from=best.planner)
