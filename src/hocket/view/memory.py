"""Memory of each device at its peak, by kind. O(tensors), numpy.

What is there before the step and the gradients that are kept are counted; the rest of the peak is
activations and workspace.
"""

from __future__ import annotations

import numpy as np

from hocket.graph.graph import Role
from hocket.plan.problem import Problem
from hocket.simulate.engine import lower
from hocket.simulate.timeline import Timeline

_LABELS = {
    Role.PARAMETER: "parameters",
    Role.OPTIMIZER_STATE: "optimizer state",
    Role.GRADIENT: "gradients",
    Role.INPUT: "batch",
    Role.BUFFER: "buffers",
}
REST = "activations"
KINDS = (*_LABELS.values(), REST)
"""Kinds of memory in the order of the tables."""


def memory_by_role(problem: Problem, timeline: Timeline) -> dict[str, tuple[int, ...]]:
    """Kind of memory to bytes per device at its peak; kinds that hold nothing are left out."""
    num_devices = timeline.num_devices
    places = lower(problem, timeline.op_device).places
    role = problem.graph.tensor_role[places.tensor]
    producer = problem.graph.tensor_producer[places.tensor]
    made_s = np.where(producer >= 0, timeline.op_start_s[producer], 0.0)
    peak_s = np.array([_peak_time_s(timeline, device) for device in range(num_devices)])
    is_there = places.is_kept & ~places.is_copy & (made_s <= peak_s[places.device])
    rest = timeline.peak_bytes.copy()
    held: dict[str, tuple[int, ...]] = {}
    for kind, label in _LABELS.items():
        chosen = is_there & (role == kind)
        sums = np.zeros(num_devices, dtype=np.int64)
        np.add.at(sums, places.device[chosen], places.num_bytes[chosen])
        sums = np.minimum(sums, rest)
        rest -= sums
        held[label] = tuple(sums.tolist())
    held[REST] = tuple(rest.tolist())
    return {label: sizes for label, sizes in held.items() if any(sizes)}


def _peak_time_s(timeline: Timeline, device: int) -> float:
    time_s, held = timeline.memory_curve(device)
    return float(time_s[np.argmax(held)]) if len(held) else 0.0
