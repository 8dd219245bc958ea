"""Generated problems with ties between ops and devices that cannot run some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from simulate.problems import numbers, problems, tape


@st.composite
def tied_problems(draw: Any, max_ops: int = 12, max_devices: int = 4) -> Any:
    """Problems with groups; every kind of device may lack some ops."""
    problem = draw(problems(max_ops, max_devices))
    graph, costs = problem.graph, problem.costs
    choices = tape(draw, 4)
    if choices.below(2):
        group = numbers(draw, graph.num_ops, range(-1, max(graph.num_ops // 3, 1) + 1))
        graph = replace(graph, group=group.astype(np.int32))
    if choices.below(4) == 0:
        op_s = costs.op_s.copy()
        op_s[choices.below(len(op_s)), choices.below(graph.num_ops)] = np.inf
        costs = replace(costs, op_s=op_s)
    return replace(problem, work=graph, op_costs=costs)


def with_memory(problem: Any, memory_bytes: int) -> Any:
    """The same problem on devices with other memory."""
    devices = tuple(replace(d, memory_bytes=memory_bytes) for d in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))
