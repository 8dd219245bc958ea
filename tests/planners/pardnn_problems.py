"""Generated problems with ties between ops and devices that cannot run some of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from simulate.problems import problems


@st.composite
def tied_problems(draw: Any, max_ops: int = 12, max_devices: int = 4) -> Any:
    """Problems with groups; every kind of device may lack some ops."""
    problem = draw(problems(max_ops, max_devices))
    graph, costs = problem.graph, problem.costs
    if draw(st.booleans()):
        number = st.integers(-1, max(graph.num_ops // 3, 1))
        group = draw(st.lists(number, min_size=graph.num_ops, max_size=graph.num_ops))
        graph = replace(graph, group=np.array(group, dtype=np.int32))
    if draw(st.integers(0, 3)) == 0:
        op_s = costs.op_s.copy()
        op_s[draw(st.integers(0, len(op_s) - 1)), draw(st.integers(0, graph.num_ops - 1))] = np.inf
        costs = replace(costs, op_s=op_s)
    return replace(problem, graph=graph, costs=costs)


def with_memory(problem: Any, memory_bytes: int) -> Any:
    """The same problem on devices with other memory."""
    devices = tuple(replace(d, memory_bytes=memory_bytes) for d in problem.cluster.devices)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))
