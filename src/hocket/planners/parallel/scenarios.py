"""Plans on changed clusters: requested changes, or those that a budget of dollars per hour buys.

Each change is a problem of its own. Of all changes that the money buys (added devices, or clusters
of one device type instead), the most promising are selected by the lower bound on their step time,
or by their memory if that is the goal. Only these are planned. O(device types) bounds.
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
from hocket.planners.devices import workers
from hocket.planners.goal import Goal, goal_values
from hocket.planners.parallel.batch_bound import batch_bound
from hocket.planners.parallel.closed_form import tables_of

_COUNTS = (1, 2, 4, 8)
_MOST_PLANNED = 4
"""Largest number of changes that are planned; the others are only bounded."""


@dataclass(frozen=True, eq=False)
class ChangedCluster:
    """A change of the cluster, with the comparison of plans on the changed cluster."""

    change: str
    comparison: Comparison

    @property
    def step_s(self) -> float | None:
        """Step time of the best candidate; None if nothing fits."""
        winner = self.comparison.winner
        return None if winner is None else winner.step_s


def what_if(
    problem: Problem, changes: Sequence[str], compared: Callable[[Problem], Comparison]
) -> list[ChangedCluster]:
    """Compare plans on the cluster after each change."""
    # All clusters are built before the first is planned, so that an invalid change is reported at
    # once.
    changed = {change: on_cluster(problem, change) for change in changes}
    return [ChangedCluster(change, compared(other)) for change, other in changed.items()]


def best_first(changed: Sequence[ChangedCluster], goal: Goal) -> list[ChangedCluster]:
    """Sort changes by the objective of the goal; those with which nothing fits come last."""
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
    """The most promising changes that this money per hour buys: added devices, or others instead.

    Changes in ``known`` are left out.
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
        # Negative, since more memory is better and the smallest value is the most promising.
        return -float(changed.memory_bytes[devices].sum())
    bound_s = batch_bound(tables_of(changed), devices.tolist()).seconds
    return bound_s if goal == "time" else bound_s * changed.cluster.price_per_hour


def on_cluster(problem: Problem, change: str) -> Problem:
    """The problem on the changed cluster, with costs from the same source."""
    return _priced(problem, changed_cluster(problem.cluster, change))


def _priced(problem: Problem, cluster: Cluster) -> Problem:
    costs = costs_from_settings(problem.graph, cluster, problem.costs.settings)
    return replace(problem, cluster=cluster, op_costs=costs)


def _affordable(cluster: Cluster, dollars_per_hour: float) -> list[tuple[str, Cluster]]:
    """For each device type, clusters with as many devices as the money buys, added or alone.

    More devices of a type are never slower, so fewer are not tried.
    """
    found = []
    for name, preset in preset_kinds().items():
        price = preset.kind.price_per_hour
        counts = [count for count in _COUNTS if price > 0 and count * price <= dollars_per_hour]
        if counts:
            for change in (f"+{counts[-1]}x{name}", f"{counts[-1]}x{name}"):
                found.append((change, changed_cluster(cluster, change)))
    return found
