"""Compare candidate plans for a problem, and for the same problem on changed clusters."""

from __future__ import annotations

from collections.abc import Sequence

from hocket.base.errors import UsageError
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.planners.candidates import Comparison
from hocket.planners.compare import compare
from hocket.planners.goal import Goal
from hocket.planners.parallel.compare import can_split_batch, compare_parallel
from hocket.planners.parallel.constraints import NO_CONSTRAINTS, Constraints
from hocket.planners.parallel.scenarios import ChangedCluster, best_first, what_if, within


def compare_candidates(
    problem: Problem,
    planners: Sequence[str] = (),
    goal: Goal = "time",
    must: Constraints = NO_CONSTRAINTS,
    num_degrees: int = 0,
) -> Comparison:
    """Compare the named planners or, without names, all strategies.

    If the batch of the graph cannot be split, only op placements are compared. ``num_degrees`` is
    the number of additional candidates with stated parallel degrees.
    """
    if isinstance(problem.work, TransformerTraining) and not planners:
        from hocket.planners.parallel.transformer_search import compare_configs

        return compare_configs(problem)
    if not planners and can_split_batch(problem):
        return compare_parallel(problem, goal, must, num_degrees)
    if must != NO_CONSTRAINTS:
        raise UsageError(
            "constraints apply to strategies that split the batch, not to op placement",
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
    """Plan for changed clusters, and for the best clusters within a price; sort by goal.

    ``dollars_per_hour`` is the price limit; None leaves the priced clusters out.
    """

    # All clusters use the same planners, so that only the clusters differ.
    def compared(changed: Problem) -> Comparison:
        return compare_candidates(changed, planners, goal, must)

    found = what_if(problem, changes, compared)
    if dollars_per_hour is not None and can_split_batch(problem):
        found += within(problem, dollars_per_hour, compared, goal, known=changes)
    return best_first(found, goal)
