"""Lifetimes of storages in a timeline, and storages held at a peak. O(tensors + reads), numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.graph.graph import Graph, Role
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


def storage_spans(graph: Graph, timeline: Timeline) -> tuple[FloatArray, FloatArray]:
    """Return the start and the end of each storage on the device that makes it, by its owner.

    A storage exists from the start of its producer to the end of its last reader; storages from
    before the step begin at minus infinity, and those held to the end of the step end at infinity.
    """
    producer, made = np.maximum(graph.tensor_producer, 0), graph.tensor_producer >= 0
    begin = np.where(made, timeline.op_start_s[producer], -np.inf)
    end = np.where(made, timeline.op_end_s[producer], -np.inf)
    np.maximum.at(end, graph.root_of[graph.reads], timeline.op_end_s[graph.reader])
    end[graph.root_of[graph.is_held]] = np.inf
    return begin, end


def held_at_peak(problem: Problem, timeline: Timeline) -> list[HeldStorage]:
    """Return the storages held on the first device at its peak, without workspaces, largest first.

    For steps on one device: a tensor that is sent is listed on the device that made it only.
    """
    graph = problem.graph
    times, held = timeline.memory_curve(0)
    if not len(held):
        return []
    peak_s = float(times[int(np.argmax(held))])
    begin, end = storage_spans(graph, timeline)
    owner = np.append(timeline.op_device, 0)[graph.owner_op]
    # Half-open lifetimes: at the end of an op its inputs are free, at the start of the next one its
    # outputs exist.
    there = (begin <= peak_s) & (end > peak_s) & (graph.held_bytes > 0) & (owner == 0)
    order = sorted(np.flatnonzero(there).tolist(), key=lambda t: (-graph.held_bytes[t], t))
    return [
        HeldStorage(
            name=graph.tensor_names[tensor],
            num_bytes=int(graph.held_bytes[tensor]),
            role=Role(int(graph.tensor_role[tensor])),
            module=graph.module_of(int(producer)) if producer >= 0 else "",
        )
        for tensor, producer in zip(order, graph.tensor_producer[order], strict=True)
    ]
