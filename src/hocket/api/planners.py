"""The planners by name, and how candidates are compared."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.planners import PLANNERS, find_planner
from hocket.planners.candidates import Comparison
from hocket.planners.compare import compare
from hocket.planners.goal import Goal
from hocket.planners.registry import FURTHER
from hocket.planners.whole.compare import can_share, compare_whole

__all__ = [
    "FURTHER",
    "PLANNERS",
    "compare",
    "compare_ways",
    "find_planner",
]


def compare_ways(problem: Problem, planners: Sequence[str] = (), goal: Goal = "time") -> Comparison:
    """The named planners compared; without names, all ways that there are to do such work.

    A training is divided. The ops of a graph are placed, or its batch is shared where it can be.
    """
    if isinstance(problem.work, TransformerTraining) and not planners:
        from hocket.planners.parallelism.search import compare_divisions

        return compare_divisions(problem)
    if not planners and can_share(problem):
        return compare_whole(problem, goal)
    return compare(problem, planners, goal)
