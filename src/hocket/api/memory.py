"""Memory: what fits into a number of bytes on one device, and how."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from pathlib import Path

import numpy as np

from hocket.api.planned import make_problem
from hocket.base.atomic import write_together
from hocket.base.errors import UsageError
from hocket.base.units import MOST_BYTES, parse_bytes
from hocket.cost.calibrate import Calibration
from hocket.cost.profile import Profile
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster
from hocket.plan.files import plan_bytes
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.candidates import empty_plan
from hocket.planners.memory.budget import BudgetFit, keep_budget
from hocket.planners.memory.fitted import Fitted
from hocket.planners.memory.frontier import Frontier, leanest_bytes
from hocket.planners.memory.largest import largest

__all__ = [
    "BudgetFit",
    "Fitted",
    "Frontier",
    "fit",
    "fit_problem",
    "largest_that_fits",
    "require_one_device",
    "save_fit",
]

PLANNER = "memory"


def fit(
    graph: Graph,
    on: str | Path | Cluster,
    memory: int | str,
    *,
    host_bytes: float = float("inf"),
    profile: Profile | None = None,
    calibration: Calibration | None = None,
) -> BudgetFit:
    """How a training step fits into ``memory``, such as ``"8GiB"``, on a cluster of one device.

    ``host_bytes`` limit what may wait on the host. The fit's ``chosen`` plan is None where nothing
    fits; its ``plan()`` raises `NoFeasiblePlanError` then.
    """
    problem = make_problem(graph, on, profile=profile, calibration=calibration)
    return fit_problem(problem, budget_of(memory), host_bytes=host_bytes)


def budget_of(memory: int | str) -> int:
    """A budget as people write it, in bytes; raises `UsageError` for what is none."""
    if not isinstance(memory, str):
        is_number = isinstance(memory, Real) and not isinstance(memory, bool)
        if not is_number or not 0 <= memory <= MOST_BYTES or memory != int(memory):
            raise UsageError(
                f"memory: {memory} is not a number of bytes", hint="write it like '8GiB'"
            )
        return int(memory)
    try:
        return parse_bytes(memory)
    except ValueError as error:
        raise UsageError(
            f"memory: {error}", hint="write it like '8GiB', or give a number of bytes"
        ) from None


def fit_problem(
    problem: Problem, memory_bytes: int, *, host_bytes: float = float("inf")
) -> BudgetFit:
    """As `fit` for a problem that is there already."""
    require_one_device(problem.cluster)
    return keep_budget(problem, _on_one(problem), memory_bytes, host_bytes=host_bytes)


def largest_that_fits(
    make_graph: Callable[[int], Graph],
    on: str | Path | Cluster,
    memory_bytes: int,
    *,
    start: int,
    most: int,
    profile: Profile | None = None,
    calibration: Calibration | None = None,
) -> int:
    """The largest size for which ``make_graph`` gives a step that fits; 0 where none does."""

    seen: set[str] = set()

    def least(size: int) -> int:
        graph = make_graph(size)
        if graph.content_hash in seen:
            raise UsageError(
                f"{graph.name} stays as it is whatever the size", hint="let something else grow"
            )
        seen.add(graph.content_hash)
        problem = make_problem(graph, on, profile=profile, calibration=calibration)
        require_one_device(problem.cluster)
        return leanest_bytes(problem, _on_one(problem))

    return largest(least, memory_bytes, start, most)


def save_fit(
    fitted: BudgetFit,
    path: str | Path,
    *,
    report: str | Path,
    graph_file: str | Path | None = None,
) -> None:
    """Write the plan with its memory section and the report, both or none of them."""
    from hocket.view.fit_report import fit_report_html

    plan = plan_bytes(path, fitted.frontier.problem, fitted.plan(), graph_file=graph_file)
    write_together({path: plan, report: fit_report_html(fitted).encode()})


def _on_one(problem: Problem) -> Plan:
    everywhere = np.zeros(problem.graph.num_ops, dtype=np.int32)
    return empty_plan(problem, PLANNER).placing(everywhere)


def require_one_device(cluster: Cluster) -> None:
    """Refuse a cluster of several devices."""
    if cluster.num_devices != 1:
        raise UsageError(
            f"{cluster.name} has {cluster.num_devices} devices; a memory plan is for one",
            hint="name one device, such as 1xh200, or machine.toml:gpu0 of a cluster file; "
            "hocket plan spreads a step over several",
        )
