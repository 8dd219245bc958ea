"""The planners by name, and how candidates are compared."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.base.errors import UsageError
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.planners import PLANNERS, find_planner
from hocket.planners.candidates import Comparison
from hocket.planners.compare import compare
from hocket.planners.goal import Goal
from hocket.planners.registry import FURTHER
from hocket.planners.whole.compare import can_share, compare_whole
from hocket.planners.whole.must import ANYTHING, Must, parse_dollars, parse_must
from hocket.planners.whole.variants import Variant, what_if, within

__all__ = [
    "FURTHER",
    "PLANNERS",
    "Must",
    "Variant",
    "compare",
    "compare_changes",
    "compare_ways",
    "find_planner",
    "parse_dollars",
    "parse_must",
]


def compare_ways(
    problem: Problem, planners: Sequence[str] = (), goal: Goal = "time", must: Must = ANYTHING
) -> Comparison:
    """The named planners compared; without names, all ways that there are to do such work.

    A training is divided. The ops of a graph are placed, or its batch is shared where it can be.
    """
    if isinstance(problem.work, TransformerTraining) and not planners:
        from hocket.planners.parallelism.search import compare_divisions

        return compare_divisions(problem)
    if not planners and can_share(problem):
        return compare_whole(problem, goal, must)
    if must != ANYTHING:
        raise UsageError(
            "limits are kept where a batch is shared out, not where its ops are placed",
            hint="plan a model instead of a graph without sizes, and name no planner",
        )
    return compare(problem, planners, goal)


def compare_changes(
    problem: Problem,
    changes: Sequence[str],
    dollars_per_hour: float | None = None,
    goal: Goal = "time",
    must: Must = ANYTHING,
) -> list[Variant]:
    """What changes of the cluster would bring, and the best that so much money per hour buys."""

    def compared(changed: Problem) -> Comparison:
        return compare_ways(changed, (), goal, must)

    found = what_if(problem, changes, compared)
    if dollars_per_hour is not None and can_share(problem):
        found += within(problem, dollars_per_hour, compared)
    return sorted(found, key=lambda v: (v.step_s is None, v.step_s or 0.0))
