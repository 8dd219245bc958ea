"""The planners by name, and how candidates are compared."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.base.errors import UsageError
from hocket.hardware.changed import changed_cluster
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.planners import PLANNERS, find_planner
from hocket.planners.candidates import Comparison
from hocket.planners.compare import compare
from hocket.planners.goal import GOALS, Goal
from hocket.planners.parallel.compare import can_split_batch, compare_parallel
from hocket.planners.parallel.constraints import (
    NO_CONSTRAINTS,
    Constraints,
    parse_constraints,
    parse_dollars,
)
from hocket.planners.parallel.scenarios import ChangedCluster, best_first, what_if, within

__all__ = [
    "GOALS",
    "PLANNERS",
    "ChangedCluster",
    "Constraints",
    "changed_cluster",
    "compare",
    "compare_candidates",
    "compare_changes",
    "compare_divided",
    "find_planner",
    "fixed_degrees",
    "parse_constraints",
    "parse_dollars",
]


def compare_candidates(
    problem: Problem,
    planners: Sequence[str] = (),
    goal: Goal = "time",
    must: Constraints = NO_CONSTRAINTS,
    num_degrees: int = 0,
) -> Comparison:
    """The named planners compared; without names, all strategies.

    A training is divided. The ops of a graph are placed, or its batch is shared where it can be.
    """
    if isinstance(problem.work, TransformerTraining) and not planners:
        from hocket.planners.parallel.transformer_search import compare_configs

        return compare_configs(problem)
    if not planners and can_split_batch(problem):
        return compare_parallel(problem, goal, must, num_degrees)
    if must != NO_CONSTRAINTS:
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
    must: Constraints = NO_CONSTRAINTS,
    planners: Sequence[str] = (),
) -> list[ChangedCluster]:
    """Plans for changed clusters, and for the best that so much money per hour buys.

    What is best by the goal comes first.
    The same planners are asked as for the cluster that is there: else these would differ, too.
    """

    def compared(changed: Problem) -> Comparison:
        return compare_candidates(changed, planners, goal, must)

    found = what_if(problem, changes, compared)
    if dollars_per_hour is not None and can_split_batch(problem):
        found += within(problem, dollars_per_hour, compared, goal, known=changes)
    return best_first(found, goal)


def compare_divided(
    problem: Problem, batch: int | None = None, must: Constraints = NO_CONSTRAINTS, most: int = 10
) -> Comparison:
    """`compare_candidates` with rows for up to ``most`` combinations of parallel degrees,
    for the batch of the graph."""
    other = problem.graph.other_batch
    if not can_split_batch(problem) or other is None:
        raise UsageError(
            f"the batch of {problem.graph.name} cannot be shared out",
            hint="capture a training step with hocket capture MODEL --batch N",
        )
    if batch not in (None, other.num_samples):
        raise UsageError(
            f"{problem.graph.name} was recorded with {other.num_samples} samples, not {batch}",
            hint=f"capture it with --batch {batch}, or name a program with --software",
        )
    return compare_candidates(problem, must=must, num_degrees=most)


def fixed_degrees(texts: Sequence[str]) -> Constraints:
    """``data=2,pipeline=4`` as limits of a config of recorded ops."""
    limits = []
    for part in ",".join(texts).split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name in ("data", "pipeline", "tensor"):
            limits.append(f"{name} {value}")
        elif name:
            raise UsageError(
                f"recorded ops are divided by data, pipeline and tensor, not by "
                f"{part.strip()[:60]!r}",
                hint="--software megatron-core divides the shape of the model in other ways",
            )
    return parse_constraints(limits)
