"""Two lanes of one device: where the ops of each run, when the second begins, what waits for what.

Microbatches take lanes in turns; a lane runs its ops in their order. What one lane has to wait for
in the other is a tensor without bytes that the op waited for makes. O(ops + waits).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from hocket.base.arrays import IntArray
from hocket.base.errors import CheckError
from hocket.cost.demand import demand_of
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role, Stream
from hocket.plan.problem import Problem
from hocket.plan.sections import Lanes
from hocket.plan.sections.lanes import LaneWait
from hocket.simulate.parallel.graph_builder import StepBuilder
from hocket.simulate.parallel.replica_copy import ReplicaCopy

LANE_STREAMS = (Stream.COMPUTE, Stream.SECOND)


@lru_cache(maxsize=64)
def in_lane(problem: Problem, lane: int) -> Problem:
    """The problem with its ops in a lane, and what they ask of the device there."""
    graph = problem.graph
    is_compute = graph.op_stream == Stream.COMPUTE
    stream = np.where(is_compute, int(LANE_STREAMS[lane]), graph.op_stream).astype(np.int8)
    costs = problem.costs
    if costs.demand is None:
        costs = replace(costs, demand=demand_of(graph, problem.cluster, costs))
    return replace(problem, work=replace(graph, op_stream=stream), op_costs=costs)


@lru_cache(maxsize=64)
def pass_order(graph: Graph) -> IntArray:
    """The ops of a wave in the order in which a lane runs them: forward, then backward."""
    ops = np.flatnonzero(graph.op_phase != Phase.OPTIMIZER)
    return ops[np.argsort(graph.op_phase[ops], kind="stable")].astype(np.int32)


def circle() -> CheckError:
    """What is wrong where waits of the plan lead back to themselves."""
    return CheckError(
        "the two lanes wait for each other in a circle", hint="plan them again with hocket waves"
    )


def lane_waits(graph: Graph, lanes: Lanes, num_waves: int) -> Iterator[LaneWait]:
    """All that ops of one lane wait for in the other.

    The lead, what the plan adds, and what keeps results those of accumulation: numbers are drawn in
    the order of the waves, and what outlasts a step (statistics of a batch norm) is changed in it.
    """
    order = pass_order(graph)
    if lanes.lead:
        yield LaneWait(1, int(order[0]), 0, int(order[lanes.lead - 1]))
    yield from lanes.waits
    drawing = order[graph.rng_order[order] >= 0]
    for wave in range(1, num_waves):
        if len(drawing):
            yield LaneWait(wave, int(drawing[0]), wave - 1, int(drawing[-1]))
        for op in _lasting_changes(graph).tolist():
            yield LaneWait(wave, op, wave - 1, op)


@lru_cache(maxsize=64)
def _lasting_changes(graph: Graph) -> IntArray:
    """Ops of a wave that change what is there before the step."""
    changed = (
        np.isin(graph.tensor_role, PERSISTENT_ROLES)
        & (graph.tensor_producer >= 0)
        & (graph.tensor_producer[graph.root_of] < 0)
    )
    ops = np.unique(graph.tensor_producer[changed])
    found: IntArray = ops[graph.op_phase[ops] != Phase.OPTIMIZER].astype(np.int32)
    return found


def hold_back(graph: Graph, own: ReplicaCopy, lanes: Lanes, sheet: StepBuilder) -> None:
    """Let ops wait for the other lane where they have to; raises `CheckError` where they cannot."""
    wrong = next(lanes.wrong_ops(graph, len(own.passes)), None)
    if wrong is not None:
        raise CheckError(wrong.message, hint="plan this step again with hocket waves")
    if lanes.changes == "wave":
        _hold_changes(graph, own, sheet)
    if lanes.apart_bytes:
        name = f"room of each lane's own{own.label}"
        _hold(
            graph, own, sheet, sheet.add_tensors([name], bytes=lanes.apart_bytes, role=Role.BUFFER)
        )
    for wait in dict.fromkeys(lane_waits(graph, lanes, len(own.passes))):
        waiting, awaited = (
            own.passes[wait.wave].op[wait.op],
            own.passes[wait.on_wave].op[wait.on_op],
        )
        if waiting < 0 or awaited < 0:
            continue  # runs once per step, after all waves
        name = f"wave {wait.wave} op {wait.op} waits for {wait.on_op}{own.label}"
        told = sheet.add_tensors([name], role=Role.CONTROL, producer=[awaited])
        sheet.add_reads(np.array([waiting]), told)


def _hold_changes(graph: Graph, own: ReplicaCopy, sheet: StepBuilder) -> None:
    """Parameters of each lane's own, and gradients that the change after the next wave uses."""
    is_owner = (graph.tensor_producer < 0) & (graph.alias_of < 0)
    is_parameter = is_owner & (graph.tensor_role == Role.PARAMETER)
    parameters = int(graph.tensor_bytes[is_parameter].sum())
    names = [f"parameters of lane {lane}{own.label}" for lane in range(len(LANE_STREAMS))]
    names.append(f"gradients of the wave before{own.label}")
    _hold(graph, own, sheet, sheet.add_tensors(names, bytes=parameters, role=Role.BUFFER))


def _hold(graph: Graph, own: ReplicaCopy, sheet: StepBuilder, held: IntArray) -> None:
    """Have tensors on the device of a replica over all of the step."""
    ops = own.passes[0].op[pass_order(graph)]
    sheet.add_reads(np.repeat(ops[ops >= 0][:1], len(held)), held)


def updated(problem: Problem, own: ReplicaCopy, lanes: Lanes | None) -> Problem:
    """The problem with updates that take as long as all of a step, where every wave makes one."""
    if lanes is None or lanes.changes == "step":
        return problem
    op_s = problem.costs.op_s.copy()
    op_s[:, problem.graph.op_phase == Phase.OPTIMIZER] *= len(own.passes)
    return replace(problem, op_costs=replace(problem.costs, op_s=op_s))
