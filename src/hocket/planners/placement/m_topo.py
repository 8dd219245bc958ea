"""m-TOPO: fill one device after another in topological order (the baseline of Baechi).

Each device gets an equal share of the total memory need, plus the largest single need so that
the rounding never leaves an op over; the walk never goes back to an earlier device. With unequal
devices the share follows their memory. Ops that move together (`bundles`) are placed when the walk
meets the op that stands for them. O(ops + reads).

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from hocket.errors import NoFeasiblePlanError
from hocket.graph.graph import Graph
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.bundles import anchor_of, bundle_of, op_memory_bytes
from hocket.planners.placement.devices import elsewhere, runnable, workers


def m_topo(problem: Problem, plan: Plan) -> Plan:
    """Place every op by m-TOPO."""
    graph = problem.graph
    bundle = bundle_of(graph)
    device_of_bundle = elsewhere(problem, bundle)
    need = np.zeros(len(device_of_bundle), dtype=np.int64)
    np.add.at(need, bundle, op_memory_bytes(graph))
    need_here = np.where(device_of_bundle < 0, need, 0)
    devices = workers(problem).tolist()
    memory = problem.memory_bytes[devices]
    caps = np.floor(need_here.sum() * (memory / memory.sum())) + need_here.max(initial=0)
    can_run = runnable(problem, bundle)[devices]
    anchor = anchor_of(graph, bundle)
    turn, used = 0, 0
    for op in breadth_first_order(graph):
        target = bundle[op]
        if device_of_bundle[target] >= 0 or anchor[target] != op:
            continue
        while used + need[target] > caps[turn] or not can_run[turn, target]:
            turn, used = turn + 1, 0
            if turn == len(devices):
                raise NoFeasiblePlanError(
                    f"m-topo has no device left for op {graph.op_names[op]!r}",
                    hint="try another planner: m-topo never goes back to an earlier device",
                )
        device_of_bundle[target] = devices[turn]
        used += int(need[target])
    return replace(plan, device_of=device_of_bundle[bundle])


def breadth_first_order(graph: Graph) -> list[int]:
    """Kahn's topological order with a first-in first-out queue."""
    src, dst = graph.edges
    by_src = np.argsort(src, kind="stable")
    start = np.searchsorted(src[by_src], np.arange(graph.num_ops + 1)).tolist()
    targets = dst[by_src].tolist()
    waiting = np.bincount(dst, minlength=graph.num_ops).tolist()
    queue = deque(op for op in range(graph.num_ops) if waiting[op] == 0)
    order = []
    while queue:
        op = queue.popleft()
        order.append(op)
        for target in targets[start[op] : start[op + 1]]:
            waiting[target] -= 1
            if waiting[target] == 0:
                queue.append(target)
    return order
