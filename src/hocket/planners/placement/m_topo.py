"""m-TOPO: fill one device after another in topological order (the baseline of Baechi).

Each device gets an equal part of the total memory need, plus the largest need of a single unit so
that rounding never leaves an op unplaced; the walk never returns to an earlier device. If devices
differ, the parts are proportional to their memory. Ops that must share a device are placed
together, when the walk reaches the op that represents them. O(reads log ops).

Jeon et al., "Baechi: fast device placement of machine learning graphs", SoCC 2020.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.graph.coarsen import anchor_of, tied_ops
from hocket.graph.graph import Graph
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Placement
from hocket.planners.devices import elsewhere, runnable, workers
from hocket.planners.placement.list_schedule.schedule_tables import breadth_first


def m_topo(problem: Problem, plan: Plan) -> Plan:
    """Place every op by m-TOPO."""
    graph, devices = problem.graph, workers(problem)
    unit_of = tied_ops(graph)
    device_of_unit = elsewhere(problem, unit_of)
    need = unit_memory_bytes(graph, unit_of)
    anchor = anchor_of(graph, unit_of)
    order = breadth_first(graph)
    # Each unit once, at the position of its anchor in the order.
    walk = unit_of[order[anchor[unit_of[order]] == order]]
    walk = walk[device_of_unit[walk] < 0]
    memory = problem.memory_bytes[devices]
    caps = np.floor(need[walk].sum() * (memory / max(1, memory.sum()))) + need[walk].max(initial=0)
    turn, stuck = _fill(need[walk], caps, runnable(problem, unit_of)[devices][:, walk])
    if stuck >= 0:
        raise NoFeasiblePlanError(
            f"m-topo has no device left for op {graph.op_names[anchor[walk[stuck]]]!r}",
            hint="try another planner: m-topo never goes back to an earlier device",
        )
    device_of_unit[walk] = devices[turn]
    return plan.having(Placement(device_of_unit[unit_of]))


def _fill(need: LongArray, caps: FloatArray, can_run: BoolArray) -> tuple[IntArray, int]:
    """Per unit of the walk: the position of its device; and the first unit left over, or -1."""
    turns = np.zeros(len(need), dtype=np.int32)
    limits, allowed, turn, used = caps.tolist(), can_run.tolist(), 0, 0
    for index, num_bytes in enumerate(need.tolist()):
        while used + num_bytes > limits[turn] or not allowed[turn][index]:
            turn, used = turn + 1, 0
            if turn == len(limits):
                return turns, index
        turns[index] = turn
        used += num_bytes
    return turns, -1


def unit_memory_bytes(graph: Graph, unit_of: IntArray) -> LongArray:
    """Bytes that each unit needs: results, inputs that it reads first, the largest workspace.

    Nothing is ever freed in this measure, as in Baechi's m-TOPO.
    """
    num_units = int(unit_of.max(initial=-1)) + 1
    workspace = np.zeros(num_units, dtype=np.int64)
    np.maximum.at(workspace, unit_of, graph.workspace_bytes)
    brought = np.zeros(num_units, dtype=np.int64)
    is_read = np.diff(graph.user_ptr) > 0
    made = graph.tensor_producer >= 0
    before = np.flatnonzero(~made & is_read)
    np.add.at(brought, unit_of[graph.tensor_producer[made]], graph.held_bytes[made])
    np.add.at(brought, unit_of[graph.users[graph.user_ptr[before]]], graph.held_bytes[before])
    return brought + workspace
