"""Advice of `hocket.prepare(on=…)`: a faster plan that needs a process per device.

One process can place ops on several devices; replicas, pipelines and shards need a process per
device. Both are planned for the same graph and cluster, and the advice names the difference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hocket.base.errors import HocketError
from hocket.base.units import format_seconds
from hocket.capture.sizes import knowing_sizes, resized
from hocket.graph.graph import Graph
from hocket.plan.files import SavedPlan
from hocket.plan.make import make_problem
from hocket.plan.sections import Parallel
from hocket.planners.parallel.compare import can_split_batch, compare_parallel
from hocket.runtime.strategy import claimed_step_s

_WORTHWHILE = 1.02
"""Ratio of steps below which the difference is within the error of any prediction."""


def faster_with_processes(placed: SavedPlan, batch: Any, traced: Callable[[Any], Graph]) -> str:
    """Return a message that names a faster plan of several processes; empty if there is none.

    ``traced`` returns the graph of a step on a batch of the same structure and any size.
    """
    graph = knowing_sizes(placed.problem.graph, lambda size: traced(resized(batch, size)))
    problem = make_problem(graph, placed.problem.cluster)
    if not can_split_batch(problem):
        return ""
    try:
        winner = compare_parallel(problem).winner
    except HocketError:
        return ""
    if winner is None or winner.plan is None or winner.step_s is None:
        return ""
    split = winner.plan.get(Parallel)
    placed_s = claimed_step_s(placed.problem, placed.plan)
    if split is None or len(split.devices) < 2 or placed_s < _WORTHWHILE * winner.step_s:
        return ""
    num_used = len(set(placed.plan.device_of.tolist())) if placed.plan.device_of is not None else 1
    how = "by op placement" if num_used > 1 else "on one device"
    strategy = winner.plan.notes.get("how", winner.planner)
    return (
        f"{strategy} takes {format_seconds(winner.step_s)} per step with hocket launch; "
        f"in this process {format_seconds(placed_s)} {how} "
        "(hint: hocket.auto(model, batch, on=…).save('plan.json'), then hocket launch plan.json)"
    )
