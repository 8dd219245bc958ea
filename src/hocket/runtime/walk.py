"""What the walk over a recorded program adds to its ops on a processor.

Op times are those of a call and of eager dispatch. A run looks tensors up, counts what is held,
notes when each op began and ended and drops what nobody needs any more, all in Python; a processor
does that itself, between two ops, while a GPU works meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hocket.cost.costs import TimeSource
from hocket.plan.problem import Problem

WALK_S = 9.3e-6
"""Per op. ``benchmarks/runtime/walk.py`` on an AMD EPYC, Python 3.11: a view takes 9.5 us and 4.5
more until the next op begins, where eager dispatch was measured as 4.7; the shortest of 35 steps,
op by op, so that other programs do not count."""


def with_walk(problem: Problem, places: Mapping[int, str]) -> Problem:
    """The problem with the times of a run on ``places``; stated times are what they are."""
    costs, devices = problem.costs, problem.cluster.devices
    rows = {
        int(costs.device_row[device])
        for device, place in places.items()
        if place == "cpu" and devices[device].kind.is_cpu
    }
    op_s = costs.op_s.copy()
    for row in rows:
        op_s[row] += WALK_S * (costs.op_source[row] != TimeSource.FILE)
    return replace(problem, op_costs=replace(costs, op_s=op_s))
