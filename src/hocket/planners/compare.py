"""Try several planners on one problem, simulate each plan, and say why the winner won."""

from __future__ import annotations

from dataclasses import dataclass

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline


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
