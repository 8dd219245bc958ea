"""Try several planners on one problem, simulate each plan, and say why the winner won."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hocket.errors import NoFeasiblePlanError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.verify import raise_violations
from hocket.planners import PLANNERS, find_planner
from hocket.simulate.analysis import bottleneck
from hocket.simulate.engine import simulate
from hocket.simulate.timeline import Timeline
from hocket.simulate.verify import violations
from hocket.units import format_bytes, format_percent


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidate:
    """What one planner proposed and what the simulator thinks of it."""

    planner: str
    plan: Plan | None
    """None where the planner found nothing."""
    timeline: Timeline | None
    """None where there is no plan."""
    feasible: bool
    reason: str
    """Why it lost or cannot be used; for the winner, why it won."""
    plan_seconds: float
    """Time that the planner took."""

    @property
    def step_s(self) -> float | None:
        """Predicted step time; None where infeasible."""
        return self.timeline.makespan_s if self.feasible and self.timeline is not None else None


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """Candidates in the order in which they were tried, and the one that was chosen."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    chosen: int | None
    """Index of the winner; None where no candidate is feasible."""
    why: str
    """One sentence: why it won and what limits it; or what is missing where none fits."""

    @property
    def winner(self) -> Candidate | None:
        """The chosen candidate."""
        return None if self.chosen is None else self.candidates[self.chosen]


def compare(problem: Problem, names: Sequence[str] = ()) -> Comparison:
    """Run the named planners (all by default) and choose the feasible plan with the shortest step.

    Ties go to the planner that stands first, so that the answer does not hang on noise.
    """
    tried = [_propose(problem, name) for name in names or PLANNERS]
    feasible = [i for i, c in enumerate(tried) if c.step_s is not None]
    if not feasible:
        return Comparison(
            problem=problem, candidates=tuple(tried), chosen=None, why=_shortage(problem, tried)
        )
    ranked = sorted(feasible, key=lambda i: (tried[i].step_s, i))
    best = tried[ranked[0]]
    assert best.timeline is not None
    assert best.step_s is not None
    why = _advantage(best, [tried[i] for i in ranked[1:]], len(tried))
    limit = bottleneck(best.timeline, problem)
    for i in ranked[1:]:
        slower = (tried[i].step_s or 0.0) / best.step_s - 1 if best.step_s > 0 else 0.0
        reason = (
            f"{format_percent(slower)} longer than {best.planner}" if slower > 0 else "no shorter"
        )
        tried[i] = replace(tried[i], reason=reason)
    tried[ranked[0]] = replace(best, reason=why)
    sentence = f"chosen because {why}; {limit}" if limit else f"chosen because {why}"
    return Comparison(problem=problem, candidates=tuple(tried), chosen=ranked[0], why=sentence)


def _propose(problem: Problem, name: str) -> Candidate:
    planner = find_planner(name)
    empty = Plan(
        planner=name,
        graph_hash=problem.graph.content_hash,
        cluster_hash=problem.cluster.content_hash,
    )
    started = time.perf_counter()
    try:
        plan = planner(problem, empty)
    except NoFeasiblePlanError as error:
        return Candidate(
            planner=name, plan=None, timeline=None, feasible=False, reason=error.message,
            plan_seconds=time.perf_counter() - started,
        )  # fmt: skip
    elapsed_s = time.perf_counter() - started
    timeline = simulate(problem, plan)
    found = violations(plan, problem, timeline)
    raise_violations([v for v in found if v.rule != "memory"], name)
    return Candidate(
        planner=name, plan=plan, timeline=timeline, feasible=not found,
        reason="; ".join(v.message for v in found[:2]), plan_seconds=elapsed_s,
    )  # fmt: skip


def _advantage(best: Candidate, others: list[Candidate], num_tried: int) -> str:
    if not others:
        return "nothing else fits" if num_tried > 1 else "it is the only candidate"
    next_s, best_s = others[0].step_s or 0.0, best.step_s or 0.0
    shorter = 1 - best_s / next_s if next_s > 0 else 0.0
    if shorter < 0.005:
        return f"its step is as short as that of {others[0].planner}"
    return f"its step is {format_percent(shorter)} shorter than the next ({others[0].planner})"


def _shortage(problem: Problem, tried: list[Candidate]) -> str:
    """What is missing, told of the candidate that comes closest to fitting."""
    best, least = None, 0
    for candidate in tried:
        if candidate.timeline is None:
            continue
        over = candidate.timeline.peak_bytes - problem.memory_bytes
        worst = int(over.max())
        if best is None or worst < least:
            best, least = (candidate, int(over.argmax())), worst
    if best is None or least <= 0:
        return "; ".join(f"{c.planner}: {c.reason}" for c in tried)
    candidate, device = best
    name = problem.cluster.devices[device].name
    return (
        f"{candidate.planner} comes closest, but {name} lacks {format_bytes(least)} "
        f"of the {format_bytes(int(problem.memory_bytes[device]) + least)} it needs"
    )
