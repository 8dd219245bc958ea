"""Storages on a device at its memory peak. O(tensors + reads), numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.graph.graph import Role
from hocket.plan.problem import Problem
from hocket.simulate.timeline import Timeline


@dataclass(frozen=True)
class HeldStorage:
    """A storage that is held at the peak."""

    name: str
    num_bytes: int
    role: Role
    module: str
    """Module of the op that made it; empty for storages from before the step."""


def held_at_peak(problem: Problem, timeline: Timeline) -> list[HeldStorage]:
    """Return the storages held on the first device at its peak, the largest first, without
    workspaces.

    For steps on one device: a tensor that is sent is listed on the device that made it only.
    """
    graph = problem.graph
    times, held = timeline.memory_curve(0)
    if not len(held):
        return []
    peak_s = float(times[int(np.argmax(held))])
    producer = graph.tensor_producer
    made = producer >= 0
    begin = np.where(made, timeline.op_start_s[np.maximum(producer, 0)], -np.inf)
    end = np.where(made, timeline.op_end_s[np.maximum(producer, 0)], -np.inf)
    reader = graph.reader
    root = graph.root_of
    np.maximum.at(end, root[graph.reads], timeline.op_end_s[reader])
    np.maximum.at(end, root, np.where(graph.is_held, np.inf, end))
    owner = np.append(timeline.op_device, 0)[graph.owner_op]
    # At the end of an op its inputs are free again, at the begin of the next its outputs are there.
    there = (begin <= peak_s) & (end > peak_s) & (graph.held_bytes > 0) & (owner == 0)
    order = sorted(np.flatnonzero(there).tolist(), key=lambda t: (-graph.held_bytes[t], t))
    return [
        HeldStorage(
            name=graph.tensor_names[tensor],
            num_bytes=int(graph.held_bytes[tensor]),
            role=Role(int(graph.tensor_role[tensor])),
            module=graph.module_of(int(producer[tensor])) if made[tensor] else "",
        )
        for tensor in order
    ]
