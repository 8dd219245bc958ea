"""auto: run the portfolio, try orders, repair memory, search further from the best, keep the best.

No placement algorithm is best on every graph, and the order in which a device runs its ops matters
as much as the placement. So every planner of the portfolio proposes a placement; the best of them
are tried with several orders; those that lack memory are repaired; a local search goes on from the
most promising ones. What is kept is simulated like everything else, and since every proposal is
also a candidate for the answer, the answer is never worse than any of them.
Cost: the sum of the planners, and a number of simulations that shrinks as graphs grow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from hocket.errors import NoFeasiblePlanError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.candidates import Candidate, judge, propose
from hocket.planners.order import best_order
from hocket.planners.placement.local_search import local_search
from hocket.planners.placement.memory import fit_memory
from hocket.planners.registry import (
    BASE,
    FURTHER,
    LAST_RESORT,
    LATENCY_PORTFOLIO,
    THROUGHPUT_PORTFOLIO,
    Planner,
)

AUTO = "auto"


@dataclass(frozen=True)
class Effort:
    """What is tried, by the size of the graph."""

    names: tuple[str, ...]
    """Planners that propose."""
    ordered: int
    """Proposals that are tried with several orders."""
    searched: int
    """Of these, the ones from which a local search goes on."""


def effort_for(problem: Problem) -> Effort:
    """Less for larger graphs, where planners and simulations take long."""
    if problem.objective == "throughput":
        return Effort(THROUGHPUT_PORTFOLIO, ordered=0, searched=0)
    if problem.graph.num_ops <= 5_000:
        return Effort((*LATENCY_PORTFOLIO, *FURTHER, LAST_RESORT), ordered=12, searched=2)
    if problem.graph.num_ops <= 50_000:
        return Effort((*LATENCY_PORTFOLIO, *FURTHER, LAST_RESORT), ordered=4, searched=2)
    return Effort(LATENCY_PORTFOLIO, ordered=1, searched=1)


def auto(problem: Problem, plan: Plan) -> Plan:
    """The best plan of the portfolio; the shortest overflow of memory where nothing fits."""
    best = portfolio(problem)[-1]
    assert best.plan is not None, "the portfolio ends with a plan"
    return replace(best.plan, planner=plan.planner or AUTO)


def portfolio(problem: Problem) -> list[Candidate]:
    """What each planner of the portfolio proposes, and ``auto`` made from them as the last.

    Raises `NoFeasiblePlanError` where no planner has a plan at all, fitting or not.
    """
    started = time.perf_counter()
    effort = effort_for(problem)
    proposed = [propose(problem, name, BASE[name]) for name in effort.names]
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
    found = _distinct(sorted((c for c in proposed if c.plan is not None), key=rank))
    ordered = [_ordered(problem, candidate) for candidate in found[: effort.ordered]]
    pool = sorted([*found, *ordered], key=rank)
    repaired = [_improved(problem, c, fit_memory, "fit-memory") for c in _worth_repair(pool)]
    if problem.contiguous:
        return [*ordered, *repaired]
    fitting = [candidate for candidate in (*pool, *repaired) if candidate.feasible]
    starts = _distinct(sorted(fitting, key=rank))[: effort.searched]
    searched = [_improved(problem, start, local_search, "local-search") for start in starts]
    return [*ordered, *repaired, *searched]


def _ordered(problem: Problem, candidate: Candidate) -> Candidate:
    assert candidate.plan is not None
    plan = best_order(problem, candidate.plan)
    return judge(problem, f"{candidate.planner} + {plan.notes['order']}", plan, 0.0)


def _improved(problem: Problem, start: Candidate, planner: Planner, name: str) -> Candidate:
    assert start.plan is not None
    return judge(problem, f"{start.planner} + {name}", planner(problem, start.plan), 0.0)


def _worth_repair(ranked: list[Candidate], most: int = 2) -> list[Candidate]:
    """Candidates that lack memory but would be faster than all that do not."""
    best_s = min((c.step_s for c in ranked if c.step_s is not None), default=np.inf)
    lacking = [c for c in ranked if not c.feasible and c.timeline is not None]
    if np.isinf(best_s):
        return lacking[:1]  # nothing fits: only what lacks least is worth the effort
    faster = [c for c in lacking if c.timeline is not None and c.timeline.makespan_s < best_s]
    return sorted(faster, key=lambda c: c.timeline.makespan_s if c.timeline else 0.0)[:most]


def _distinct(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first candidate of each placement."""
    first: dict[bytes, Candidate] = {}
    for candidate in candidates:
        assert candidate.plan is not None
        assert candidate.plan.device_of is not None
        first.setdefault(candidate.plan.device_of.tobytes(), candidate)
    return list(first.values())


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
    notes = {**best.plan.notes, "made_from": best.planner}
    return replace(best.plan, planner=AUTO, notes=notes)
