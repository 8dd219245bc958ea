"""Plans on changed clusters: the requested changes, or those that a sum of money buys.

Each change is a separate problem. Of all that money buys (devices put in, clusters of one
type instead) bounds select the most promising: the lower bound on the step time of these devices,
or their memory where that is the goal. Only these are planned. O(device types) bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hocket.cost.roofline import costs_from_settings
from hocket.hardware.changed import changed_cluster
from hocket.hardware.cluster import Cluster
from hocket.hardware.kinds import preset_kinds
from hocket.plan.problem import Problem
from hocket.planners.candidates import Comparison
from hocket.planners.goal import Goal, goal_values
from hocket.planners.parallel.batch_bound import batch_bound
from hocket.planners.parallel.closed_form import tables_of
from hocket.planners.placement.devices import workers

_COUNTS = (1, 2, 4, 8)
_MOST_PLANNED = 4


@dataclass(frozen=True, eq=False)
class ChangedCluster:
    """A change of the cluster, and what is best then."""

    change: str
    comparison: Comparison

    @property
    def step_s(self) -> float | None:
        """Of the best candidate; None where nothing fits."""
        winner = self.comparison.winner
        return None if winner is None else winner.step_s


def what_if(
    problem: Problem, changes: Sequence[str], compared: Callable[[Problem], Comparison]
) -> list[ChangedCluster]:
    """The best candidate after each change."""
    # Made before the first is planned, so that an invalid one is reported at once.
    changed = {change: on_cluster(problem, change) for change in changes}
    return [ChangedCluster(change, compared(other)) for change, other in changed.items()]


def best_first(changed: Sequence[ChangedCluster], goal: Goal) -> list[ChangedCluster]:
    """Changes by what the goal makes small, those with which nothing fits last."""
    winners = [(v.comparison.problem, v.comparison.winner) for v in changed]
    fitting = [(problem, winner) for problem, winner in winners if winner is not None]
    values = iter(goal_values(fitting, goal))
    rank = [np.inf if winner is None else next(values) for _, winner in winners]
    return [changed[i] for i in np.argsort(rank, kind="stable")]


def within(
    problem: Problem,
    dollars_per_hour: float,
    compared: Callable[[Problem], Comparison],
    goal: Goal = "time",
    known: Sequence[str] = (),
) -> list[ChangedCluster]:
    """The best of what so much money per hour buys: devices put in, or others instead.

    Changes that are known already are left out.
    """
    hopes = [
        (_hope(_priced(problem, cluster), goal), change)
        for change, cluster in _affordable(problem.cluster, dollars_per_hour)
        if change not in known
    ]
    return what_if(problem, [change for _, change in sorted(hopes)[:_MOST_PLANNED]], compared)


def _hope(changed: Problem, goal: Goal) -> float:
    """Approximate lower bound on the objective of ``goal`` on a changed cluster."""
    devices = workers(changed)
    if goal == "memory":
        return -float(changed.memory_bytes[devices].sum())
    bound_s = batch_bound(tables_of(changed), devices.tolist()).seconds
    return bound_s if goal == "time" else bound_s * changed.cluster.price_per_hour


def on_cluster(problem: Problem, change: str) -> Problem:
    """The problem on the changed cluster, priced like the first."""
    return _priced(problem, changed_cluster(problem.cluster, change))


def _priced(problem: Problem, cluster: Cluster) -> Problem:
    costs = costs_from_settings(problem.graph, cluster, problem.costs.settings)
    return replace(problem, cluster=cluster, op_costs=costs)


def _affordable(cluster: Cluster, dollars_per_hour: float) -> list[tuple[str, Cluster]]:
    """Of each kind as many as the money buys, put in or alone; more of a kind are never slower."""
    found = []
    for name, preset in preset_kinds().items():
        price = preset.kind.price_per_hour
        counts = [count for count in _COUNTS if price > 0 and count * price <= dollars_per_hour]
        if counts:
            for change in (f"+{counts[-1]}x{name}", f"{counts[-1]}x{name}"):
                found.append((change, changed_cluster(cluster, change)))
    return found
