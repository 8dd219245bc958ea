"""Candidates: plans with simulated results, their comparison, and the reason why one won.

`propose` runs a planner and `judge` simulates its plan and checks its legality. A `Comparison`
holds all candidates with the winner and a lower bound.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hocket.base.errors import NoFeasiblePlanError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.verify import raise_violations
from hocket.planners.bounds import LowerBound
from hocket.simulate.engine import simulate
from hocket.simulate.load import max_load_s
from hocket.simulate.timeline import Timeline
from hocket.simulate.verify import violations

LIMITS = ("memory", "contiguous")
"""Rules whose violation makes a plan infeasible here; violations of others are errors."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidate:
    """Plan of one planner and its simulated result."""

    planner: str
    plan: Plan | None
    """None if the planner found no plan."""
    timeline: Timeline | None
    """None if there is no plan, and for pipelines, of which hundreds are simulated."""
    feasible: bool
    reason: str
    """Why it lost or is infeasible; for the winner, why it won."""
    plan_seconds: float
    """Run time of the planner."""
    max_load_s: float | None = None
    """Load of the busiest device; None unless throughput is the objective."""
    saved_s: float = 0.0
    """Seconds that overlap with the next step: gradient sync during its forward pass.

    `step_s` is then the time per step in steady state.
    """
    waits_s: float = 0.0
    """Seconds that two streams wait for each other, which the timeline does not include."""

    @property
    def step_s(self) -> float | None:
        """Predicted step time; None if infeasible."""
        if not self.feasible or self.plan is None:
            return None
        if self.timeline is None:
            return self.plan.claims.step_s
        return self.timeline.makespan_s + self.waits_s - self.saved_s

    @property
    def value_s(self) -> float | None:
        """Seconds that the objective minimises; None if infeasible."""
        return self.step_s if self.max_load_s is None or not self.feasible else self.max_load_s


@dataclass(frozen=True, eq=False, kw_only=True)
class SimulatedCandidate(Candidate):
    """A candidate that has a plan, with its timeline."""

    plan: Plan
    timeline: Timeline


@dataclass(frozen=True, eq=False, kw_only=True)
class Comparison:
    """Candidates in the order in which they were tried, and the chosen one."""

    problem: Problem
    candidates: tuple[Candidate, ...]
    chosen: int | None
    """Index of the winner; None if no candidate is feasible."""
    why: str
    """One sentence: reason and bottleneck of the winner, or the missing memory if nothing fits."""
    bound: LowerBound | None = None
    """Lower bound that no plan can beat, if known."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Number of configs that were tried, that fit, and that were simulated."""

    def __repr__(self) -> str:
        chosen = None if self.winner is None else self.winner.planner
        return f"Comparison({len(self.candidates)} candidates, chosen {chosen!r})"

    @property
    def winner(self) -> Candidate | None:
        """The chosen candidate; None if no candidate is feasible."""
        return None if self.chosen is None else self.candidates[self.chosen]

    def required_winner(self, *, is_limited: bool = False) -> Candidate:
        """Return the winner; raises `NoFeasiblePlanError` if nothing fits.

        With ``is_limited`` the error suggests relaxing the limits.
        """
        winner = self.winner
        if winner is not None and winner.plan is not None and winner.timeline is not None:
            return winner
        cluster = self.problem.cluster
        has_headroom = any(kind.headroom_bytes for kind in cluster.kinds)
        raise NoFeasiblePlanError(
            f"no candidate {'keeps the limits on' if is_limited else 'fits'} "
            f"{cluster.name}: {self.why}",
            hint="ask for less (--must), " * is_limited
            + "use more or larger devices, a smaller batch, or 16-bit parameters"
            + (", or keep less free with --headroom" if has_headroom else ""),
        )

    @property
    def least_step_s(self) -> float | None:
        """Shortest step of all candidates that fit; all steps are shown in its unit."""
        return min((c.step_s for c in self.candidates if c.step_s is not None), default=None)

    @property
    def gap(self) -> float | None:
        """Relative gap between the winner and the lower bound, as a fraction of the winner."""
        value_s = self.winner.value_s if self.winner is not None else None
        if self.bound is None or value_s is None or value_s <= 0:
            # A plan that takes no time has no gap to a bound.
            return None
        return max(0.0, 1 - self.bound.seconds / value_s)


def empty_plan(problem: Problem, name: str) -> Plan:
    """Return a plan without decisions, the input of planners."""
    return Plan(
        planner=name, work_hash=problem.work_hash, cluster_hash=problem.cluster.content_hash
    )


def propose(problem: Problem, name: str, planner: Callable[[Problem, Plan], Plan]) -> Candidate:
    """Run one planner and simulate its plan."""
    started = time.perf_counter()
    try:
        plan = planner(problem, empty_plan(problem, name))
    except NoFeasiblePlanError as error:
        return Candidate(
            planner=name, plan=None, timeline=None, feasible=False,
            reason=error.message, plan_seconds=time.perf_counter() - started,
        )  # fmt: skip
    return judge(problem, name, plan, time.perf_counter() - started)


def judge(problem: Problem, name: str, plan: Plan, plan_seconds: float) -> Candidate:
    """Simulate a plan and check whether it is feasible; raises `CheckError` if it is not legal."""
    timeline = simulate(problem, plan)
    found = violations(plan, problem, timeline)
    # A plan may exceed memory or break contiguity; any other violation is a planner's bug.
    raise_violations([v for v in found if v.rule not in LIMITS], name)
    plan = plan.claiming(step_s=timeline.makespan_s, peak_bytes=tuple(timeline.peak_bytes.tolist()))
    load_s = None
    if problem.objective == "throughput" and plan.device_of is not None:
        load_s = max_load_s(problem, plan.device_of)
    return SimulatedCandidate(
        planner=name, plan=plan, timeline=timeline, max_load_s=load_s, feasible=not found,
        reason="; ".join(v.message for v in found[:2]), plan_seconds=plan_seconds,
    )  # fmt: skip
