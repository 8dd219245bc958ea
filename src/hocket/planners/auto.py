"""auto: run the portfolio, try orders, repair memory, search further from the best, keep the best.

No placement algorithm is best on every graph, and the order in which a device runs its ops matters
as much as the placement. So every planner of the portfolio proposes a placement; all of them, or as
many as the work allows, the best first, are tried with every order; those that lack memory are
repaired; a local search looks at the most promising ones and goes on from those that gain most, at
last from the best, until a plan is proven to be the shortest. Of tiny graphs every plan is tried.
What is kept is simulated like everything else, and since every proposal is also a candidate for the
answer, the answer is never worse than any of them.
Cost: the sum of the planners, and a number of simulations that shrinks as graphs grow. What the
budget leaves out, `effort_for` says: planners and orders by the size of the graph, and of all local
searches that a user could ask for, from every planner in every order, all but the most promising.
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
from hocket.planners.placement.exhaustive import (
    MAX_RUNS,
    can_be_tried,
    is_tiny,
    try_all,
)
from hocket.planners.placement.local_search import local_search, num_evaluations
from hocket.planners.placement.structural import by_structure
from hocket.planners.registry import (
    BASE,
    BY_POSITION,
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
"""Ops that are simulated to try orders, about."""
_RUNS_PER_PLACEMENT = 12
"""Simulations that it takes to try all orders of a placement, about."""
_SMALL_OPS = 64
"""Up to so many ops planners that search propose too, which takes about a second; on larger graphs
they take longer and their plans twice as long as others. Local searches get further then."""
_LARGE_OPS = 5_000
"""Up to so many ops planners that cut propose too, and searches start from placements that do not
depend on the order of ops in the file."""
_SEARCH_WORK = 5_000_000
"""Ops that are simulated in whole local searches, about: two of them, or more on small graphs."""
_MOST_REPAIRED = 2
"""Placements that lack memory but would be the fastest, of which a repair is tried."""
_LONGEST_SEARCH = 3.0
"""Of a whole one: simulations of the smallest graphs take so little that searches go on."""
_MOST_SEARCHES = 12
"""Of whole ones; more planners than this seldom propose different placements."""
_EXACT = 1e-9
"""Of a step: what is nearer to the bound than this is the shortest."""
_ALL = 1_000


@dataclass(frozen=True)
class Effort:
    """Amount of work, by the size of the graph."""

    names: tuple[str, ...]
    """Planners that propose."""
    ordered: int
    """Placements that are tried with every order."""
    searches: tuple[tuple[int, float], ...] = ()
    """Rounds of local search: from how many of the best plans, with which share of the work."""


def effort_for(problem: Problem) -> Effort:
    """Less for larger graphs, where planners and simulations take long."""
    num_ops = problem.graph.num_ops
    if problem.objective == "throughput":
        return Effort(THROUGHPUT_PORTFOLIO, ordered=0)
    ordered = max(1, _ORDER_WORK // (_RUNS_PER_PLACEMENT * max(num_ops, 1)))
    names: tuple[str, ...]
    if num_ops <= _LARGE_OPS:
        slow = SLOW if num_ops <= _SMALL_OPS else ()
        names = (*LATENCY_PORTFOLIO, *FURTHER, *CUTS, *slow, LAST_RESORT)
        share = min(max(_SMALL_OPS / max(num_ops, 1), 1.0), _LONGEST_SEARCH)
        whole = int(_SEARCH_WORK // max(num_ops * num_evaluations(max(num_ops, 1), share), 1))
        rounds = ((8, 1 / 16), (4, 1 / 8), (min(whole, _MOST_SEARCHES), share), (1, share))
        return Effort(names, ordered=_ALL, searches=rounds)
    if num_ops <= 50_000:
        names = (*LATENCY_PORTFOLIO, *FURTHER, LAST_RESORT)
        return Effort(names, ordered=ordered, searches=((4, 1 / 4), (1, 1.0)))
    return Effort((*LATENCY_PORTFOLIO, *FINE), ordered=ordered, searches=((1, 1.0),))


def auto(problem: Problem, plan: Plan) -> Plan:
    """The best plan of the portfolio; the shortest overflow of memory where nothing fits."""
    best = portfolio(problem)[-1]
    assert best.plan is not None, "the portfolio ends with a plan"
    return replace(best.plan, planner=plan.planner or AUTO)


def portfolio(problem: Problem, known: Sequence[Candidate] = ()) -> list[Candidate]:
    """Candidates of all planners in the portfolio, followed by that of ``auto``.

    Candidates in ``known`` are reused instead of running their planners again. Raises
    `NoFeasiblePlanError` where no planner has a plan at all, fitting or not.
    """
    started = time.perf_counter()
    effort = effort_for(problem)
    by_name = {candidate.planner: candidate for candidate in known}
    proposed = [by_name.get(name) or propose(problem, name, BASE[name]) for name in effort.names]
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
    """Further candidates made from the best proposals."""
    rank = _rank(problem)
    # Searches start from planners that do not go by the file: none of them is left out because
    # one that does happens to place alike.
    found = _of_each(
        sorted((c for c in proposed if c.plan is not None), key=rank),
        lambda candidate: (_placement(candidate), _origin(candidate) in BY_POSITION),
    )
    ordered = [_ordered(problem, candidate) for candidate in found[: effort.ordered]]
    pool = sorted([*found, *ordered], key=rank)
    relieved = [_improved(problem, c, BASE[RELIEF], RELIEF) for c in _worth_repair(pool)]
    pool = sorted([*pool, *relieved], key=rank)
    mend = BASE["spread-memory"]
    repaired = [_improved(problem, c, mend, "spread-memory") for c in _worth_repair(pool)]
    repaired = [*relieved, *repaired]
    if problem.contiguous:
        return [*ordered, *repaired]
    fitting = [candidate for candidate in (*pool, *repaired) if candidate.feasible]
    exact, is_proven = _tried_all(problem, fitting) if is_tiny(problem) else ([], False)
    searched = [] if is_proven else _searched(problem, [*fitting, *exact], effort)
    if can_be_tried(problem) and not is_tiny(problem):
        # Of what a search has found, few placements may still be better.
        exact, _ = _tried_all(problem, [*fitting, *searched])
    return [*ordered, *repaired, *exact, *searched]


def _searched(problem: Problem, fitting: list[Candidate], effort: Effort) -> list[Candidate]:
    """Plans from rounds of local search, each from the best plans that are there by then."""
    searched: list[Candidate] = []
    shortest_s = lower_bound(problem).seconds * (1 + _EXACT)
    possible = _starts(problem, fitting, effort)
    for num_starts, share in effort.searches:
        if min((c.step_s for c in (*fitting, *searched) if c.step_s), default=np.inf) <= shortest_s:
            break
        ranked = sorted([*possible, *searched], key=_rank(problem))
        starts = _of_each(_of_each(ranked, _origin), _placement)[:num_starts]
        search = by_structure(partial(local_search, share=share))
        searched += [_improved(problem, start, search, "local-search") for start in starts]
    return searched


def _starts(problem: Problem, fitting: list[Candidate], effort: Effort) -> list[Candidate]:
    """Plans that searches may start from; independent of the order of ops in the file."""
    if problem.graph.num_ops > _LARGE_OPS:
        return fitting
    names = [name for name in BY_POSITION if name in effort.names and name not in SLOW]
    structural = [propose(problem, name, by_structure(BASE[name])) for name in names]
    structural = [candidate for candidate in structural if candidate.feasible]
    known = [candidate for candidate in fitting if _origin(candidate) not in BY_POSITION]
    return [*known, *structural, *(_ordered(problem, candidate) for candidate in structural)]


def _tried_all(problem: Problem, known: list[Candidate]) -> tuple[list[Candidate], bool]:
    """The best of all plans of a tiny graph if it is better than those known; whether of all."""
    known_s = min((c.step_s for c in known if c.step_s is not None), default=np.inf)
    answer = try_all(problem, empty_plan(problem, AUTO), MAX_RUNS, known_s)
    found = [] if answer.plan is None else [judge(problem, "all plans", answer.plan, 0.0)]
    return found, answer.is_complete


def _ordered(problem: Problem, candidate: Candidate) -> Candidate:
    assert candidate.plan is not None
    plan = by_structure(best_order)(problem, candidate.plan)
    return judge(problem, f"{candidate.planner} + {plan.claims.order}", plan, 0.0)


def _improved(problem: Problem, start: Candidate, planner: Planner, name: str) -> Candidate:
    assert start.plan is not None
    label = start.planner if start.planner.endswith(name) else f"{start.planner} + {name}"
    return judge(problem, label, planner(problem, start.plan), 0.0)


def _worth_repair(ranked: list[Candidate]) -> list[Candidate]:
    """Candidates that lack memory but would be faster than all that do not."""
    best_s = min((c.step_s for c in ranked if c.step_s is not None), default=np.inf)
    lacking = [c for c in ranked if not c.feasible and c.timeline is not None]
    if np.isinf(best_s):
        return lacking[:1]  # nothing fits: only what lacks least is worth the effort
    faster = [c for c in lacking if c.timeline is not None and c.timeline.makespan_s < best_s]
    return sorted(faster, key=lambda c: c.timeline.makespan_s if c.timeline else 0.0)[
        :_MOST_REPAIRED
    ]


def _of_each(
    candidates: Iterable[Candidate], key: Callable[[Candidate], object]
) -> list[Candidate]:
    """The first candidate of each key."""
    first: dict[object, Candidate] = {}
    for candidate in candidates:
        first.setdefault(key(candidate), candidate)
    return list(first.values())


def _placement(candidate: Candidate) -> bytes:
    assert candidate.plan is not None
    assert candidate.plan.device_of is not None
    return candidate.plan.device_of.tobytes()


def _origin(candidate: Candidate) -> str:
    """The planner that a candidate started from: searches from one start end in similar plans."""
    return candidate.planner.split(" + ")[0]


def _rank(problem: Problem) -> Callable[[Candidate], tuple[float, float]]:
    """The key by which candidates are ranked: what does not fit last, by what it lacks."""

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
