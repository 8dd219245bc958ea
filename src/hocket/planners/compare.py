"""Try several planners on one problem, simulate each plan, and explain why the winner won."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hocket.base.errors import UsageError
from hocket.base.units import format_percent
from hocket.plan.problem import Problem
from hocket.planners import find_planner
from hocket.planners.auto import AUTO, portfolio
from hocket.planners.bounds import LowerBound, lower_bound
from hocket.planners.candidates import Candidate, Comparison, propose
from hocket.planners.goal import (
    TIED,
    Goal,
    cost_efficiency_text,
    devices_text,
    num_devices,
    objective_text,
)
from hocket.planners.goal import ranked as rank
from hocket.planners.placement.baselines import ONE_DEVICE
from hocket.planners.placement.memory_fit import spread_memory
from hocket.planners.placement.memory_shortage import explain_shortage
from hocket.planners.registry import BASE, LAST_RESORT, RELIEF, REPAIRED
from hocket.simulate.analysis import bottleneck


def compare(problem: Problem, names: Sequence[str] = (), goal: Goal = "time") -> Comparison:
    """Run the named planners (``auto`` by default) and choose the best feasible plan for the goal.

    ``auto`` includes all planners of its portfolio, each of them a candidate. Ties go to
    fewer devices, less money and less memory, then to the planner that is listed first. A single
    device has only one candidate, unless the step does not fit in its memory.
    """
    if problem.graph.op_stream.any():
        raise UsageError(
            "the graph has ops on further streams of a device, which planners do not place",
            hint="plan the graph from which it was made",
            where=problem.graph.name,
        )
    tried: list[Candidate] = []
    if not names and problem.cluster.num_devices == 1:
        alone = propose(problem, ONE_DEVICE, BASE[ONE_DEVICE])
        tried, names = ([alone], ()) if alone.feasible else ([], (AUTO,))
    elif not names:
        names = (AUTO,)
    for name in names:
        tried += portfolio(problem) if name == AUTO else _single(problem, name)
    bound = _bound(problem, tried)
    ranked = rank(problem, tried, goal)
    if not ranked:
        return Comparison(
            problem=problem, candidates=tuple(tried), chosen=None, bound=bound,
            why=_shortage(problem, tried),
        )  # fmt: skip
    why = _sentence(problem, tried, ranked, goal)
    return Comparison(
        problem=problem, candidates=_with_reasons(tried, ranked), chosen=ranked[0], why=why,
        bound=bound,
    )  # fmt: skip


def _bound(problem: Problem, tried: list[Candidate]) -> LowerBound:
    """Return the largest known lower bound: some planners prove their own."""
    bound = lower_bound(problem)
    # A contiguous split is proven best only among splits of one order, so its bound does not hold
    # for plans that beat it.
    best_s = min((c.value_s for c in tried if c.value_s is not None), default=np.inf)
    for candidate in tried:
        if candidate.plan is None:
            continue
        claims = candidate.plan.claims
        is_load = problem.objective == "throughput"
        proven_s = claims.load_bound_s if is_load else claims.step_bound_s
        if proven_s is not None and bound.seconds < proven_s <= best_s:
            bound = replace(bound, seconds=proven_s, why=f"proven by {candidate.planner}")
    return bound


def _single(problem: Problem, name: str) -> list[Candidate]:
    """Return the candidate of one planner and, if it lacks memory, repaired versions of it."""
    candidate = propose(problem, name, find_planner(name))
    if candidate.feasible or name not in REPAIRED:
        return [candidate]
    start = candidate.plan
    if start is None:  # it gave up: nothing to repair
        return [candidate, propose(problem, f"{name} + {LAST_RESORT}", BASE[LAST_RESORT])]
    relieved = propose(problem, f"{name} + {RELIEF}", lambda p, _: BASE[RELIEF](p, start))
    repaired = propose(problem, f"{name} + spread-memory", lambda p, _: spread_memory(p, start))
    return [candidate, *([relieved] if relieved.feasible else []), repaired]


def _shortage(problem: Problem, tried: list[Candidate]) -> str:
    """Describe the missing memory if nothing fits, and remedies."""
    found = explain_shortage(problem, [c.plan for c in tried if c.plan is not None])
    if found.lacking_bytes == 0:
        # Something fits, only not from the requested planners, or not contiguously.
        reasons = "; ".join(f"{c.planner}: {c.reason}" for c in tried if c.reason)
        peaks = [c.timeline.peak_bytes for c in tried if c.timeline is not None]
        fits = any((peak <= problem.memory_bytes).all() for peak in peaks)
        rest = "what fits is not contiguous" if fits else "other planners find a plan that fits"
        return f"{reasons}; {rest}"
    return "; ".join(part for part in (found.message, found.smallest_change) if part)


def _with_reasons(tried: list[Candidate], ranked: list[int]) -> tuple[Candidate, ...]:
    """Return the candidates, with the reason why each feasible one won or lost."""
    best = tried[ranked[0]]
    message = list(tried)
    message[ranked[0]] = replace(
        best, reason=_advantage(best, [tried[i] for i in ranked[1:]], tried)
    )
    for i in ranked[1:]:
        # A candidate that lost a tie may even be slightly shorter.
        longer = _ratio(tried[i], best) - 1
        reason = (
            f"{format_percent(longer)} longer than {best.planner}" if longer > 0 else "no shorter"
        )
        message[i] = replace(tried[i], reason=reason)
    return tuple(message)


def _sentence(problem: Problem, tried: list[Candidate], ranked: list[int], goal: Goal) -> str:
    best = tried[ranked[0]]
    assert best.timeline is not None
    if goal == "cost":
        parts = [f"chosen because its steps cost least ({devices_text(num_devices(best))})"]
    elif goal == "memory" and len(ranked) > 1:
        others = [tried[i] for i in ranked[1:]]
        parts = [f"chosen because {objective_text(problem, best, others, goal)}"]
    else:
        parts = [f"chosen because {_advantage(best, [tried[i] for i in ranked[1:]], tried)}"]
    parts.append(cost_efficiency_text(tried, ranked[0]))
    if best.plan is not None and best.plan.claims.made_from:
        parts.append(f"made from {best.plan.claims.made_from}")
    if problem.objective == "latency":
        parts.append(bottleneck(best.timeline, problem))
    return "; ".join(part for part in parts if part)


def _advantage(best: Candidate, others: list[Candidate], tried: list[Candidate]) -> str:
    if not others:
        return "nothing else fits" if len(tried) > 1 else "it is the only candidate"
    what = "step" if best.max_load_s is None else "busiest device's load"
    shorter = 1 - 1 / _ratio(others[0], best)
    if shorter < TIED:
        fewer = num_devices(best) < num_devices(others[0])
        on = f" on {devices_text(num_devices(best))} instead of {num_devices(others[0])}"
        return f"its {what} is as short as that of {others[0].planner}{on if fewer else ''}"
    return f"its {what} is {format_percent(shorter)} shorter than the next ({others[0].planner})"


def _ratio(other: Candidate, best: Candidate) -> float:
    """Ratio of another candidate's value to the best; 1 if the best takes no time."""
    other_s, best_s = other.value_s or 0.0, best.value_s or 0.0
    return other_s / best_s if best_s > 0 else 1.0
