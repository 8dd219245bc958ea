"""The lower bound: a number that no legal plan beats, with what it comes from.

The largest of several bounds, each proven where it is computed: chains of ops with the transfers
that cannot be avoided and ops that must share a device (`heads`), work and memory of all devices
together (`load`), and the work between heads and tails. They hold in every transfer mode, because
each assumes no more than that a transfer takes its time alone on the fastest route between two
devices. Near-linear in the size of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hocket.plan.problem import Problem
from hocket.planners.bounds.classes import BoundClasses, find_classes
from hocket.planners.bounds.heads import Heads, find_heads, windows_s
from hocket.planners.bounds.load import Load, find_load, shared_work_s
from hocket.planners.bounds.units import BoundUnits, find_units

PATH = "the longest chain of ops and unavoidable transfers"
SERIAL = "ops that must share a device"
WORK = "the work of all devices together"
WINDOW = "the work that stands between heads and tails"
MEMORY = "the work of all devices together, as memory lets it be shared out"
CROWD = "more long ops than devices"


@dataclass(frozen=True)
class LowerBound:
    """A number of seconds that no legal plan of a problem beats."""

    seconds: float
    why: str
    """What the number comes from, as in "limited by …"."""
    parts: Mapping[str, float]
    """All that was computed: what it comes from, to seconds."""


def lower_bound(problem: Problem) -> LowerBound:
    """The bound for what the problem wants small: the step, or the load of the busiest device.

    Raises `NoFeasiblePlanError` where some op can run on no device.
    """
    if problem.graph.num_ops == 0:
        return LowerBound(0.0, WORK, {WORK: 0.0})
    units = find_units(problem.graph)
    classes = find_classes(problem, units)
    load = find_load(units, classes)
    parts = _load_parts(load)
    if problem.objective == "latency":
        heads = find_heads(problem.graph, units, classes)
        parts |= _step_parts(heads, load, units, classes)
    # What is summed here and in the simulator is rounded at each of up to num_ops additions.
    rounding = 1 - 8 * (problem.graph.num_ops + 8) * float(np.finfo(np.float64).eps)
    parts = {why: seconds * rounding for why, seconds in parts.items()}
    why = max(parts, key=parts.__getitem__)
    return LowerBound(parts[why], why, parts)


def _load_parts(load: Load) -> dict[str, float]:
    return {WORK: load.work_s, MEMORY: load.memory_s, CROWD: load.crowd_s}


def _step_parts(
    heads: Heads, load: Load, units: BoundUnits, classes: BoundClasses
) -> dict[str, float]:
    everything = np.zeros(len(units.of_op), dtype=np.int64)
    head_s, tail_s = heads.head_s.min(axis=0), heads.tail_s.min(axis=0)
    work_s = shared_work_s(classes.op_s, load.weight)
    return {
        PATH: float(heads.path_s(classes.op_s).max()),
        WINDOW: float(windows_s(everything, head_s, tail_s, work_s).max()),
        SERIAL: _serial_s(heads, units, classes),
    }


def _serial_s(heads: Heads, units: BoundUnits, classes: BoundClasses) -> float:
    """The unit that takes longest: its ops run one after another, wherever it is."""
    sizes = np.bincount(units.of_op, minlength=units.count)
    joined = np.flatnonzero(sizes[units.of_op] > 1)
    if not len(joined):
        return 0.0
    _, part_of_op = np.unique(units.of_op[joined], return_inverse=True)
    shortest_s = np.full(int(part_of_op.max()) + 1, np.inf)
    for head_s, op_s, tail_s in zip(heads.head_s, classes.op_s, heads.tail_s, strict=True):
        times = head_s[joined], tail_s[joined], op_s[joined]
        able = np.isfinite(sum(times))
        impossible = np.bincount(part_of_op, ~able, len(shortest_s)) > 0
        found_s = windows_s(part_of_op, *(np.where(able, seconds, 0.0) for seconds in times))
        shortest_s = np.minimum(shortest_s, np.where(impossible, np.inf, found_s))
    return float(shortest_s.max())
