"""Planning on a coarse graph: the problem made smaller, and its plan expanded to all ops.

`coarsely` wraps a planner: it plans the fused graph of co-placed units, and every op goes where its
node went. O(ops + reads), besides the planner.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.cost.costs import Costs
from hocket.graph.coarsen import Coarse, co_placed, forward_only, fuse
from hocket.graph.coarsen.nodes import largest
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.devices import workers
from hocket.planners.shared import Planner, once_per_problem

UNITS_PER_DEVICE = 8
"""A unit may take this part of a device's fair share of the work, so that loads can be evened."""
MEMORY_PARTS = 4
"""A unit may hold this part of the memory of the smallest device."""


@once_per_problem
def coarsened(problem: Problem) -> Coarse:
    """The fused graph of co-placed units under the usual caps."""
    op_s = fastest_s(problem)
    return fuse(problem.graph, default_units(problem, op_s), op_s)


@once_per_problem
def forward_coarsened(problem: Problem) -> Coarse:
    """The forward pass of co-placed units under the usual caps, the rest of the step inside."""
    op_s = fastest_s(problem)
    # A gradient that several nodes add to is passed along them, at a cost that planners see; tying
    # them would make one node of all time steps of a layer, which nothing could overlap.
    units = default_units(problem, op_s, joins_gradients=False)
    return forward_only(problem.graph, units, op_s)


def coarse_problem(problem: Problem, coarse: Coarse) -> Problem:
    """The same problem for the coarse graph."""
    costs, num_nodes = problem.costs, coarse.graph.num_ops
    op_s = np.array(
        [np.bincount(coarse.node_of, row, minlength=num_nodes) for row in costs.op_s],
        dtype=np.float64,
    ).reshape(len(costs.op_s), num_nodes)
    # A node's time is as sure as its least sure op: `Source` counts from the model up.
    op_source = np.full(op_s.shape, np.iinfo(np.uint8).max, dtype=np.uint8)
    for row, source in enumerate(costs.op_source):
        np.minimum.at(op_source[row], coarse.node_of, source)
    return replace(
        problem,
        work=coarse.graph,
        op_costs=replace(
            costs,
            op_s=op_s,
            op_source=op_source,
            tensor_bytes=_sent_bytes(costs, coarse),
            tensor_s=_sent_s(costs, coarse),
        ),
    )


def expand(problem: Problem, coarse: Coarse, plan: Plan) -> Plan:
    """The plan of the coarse problem as a plan of the problem itself.

    Ops go where their node went. An order or priorities of nodes become priorities of ops, in which
    ops of one node keep their order; where a node of the forward pass includes later ops, these
    come after it in the mirrored order.
    """
    assert plan.device_of is not None, "a plan is expanded after its placement"
    return replace(plan, work_hash=problem.graph.content_hash if plan.work_hash else "").placing(
        plan.device_of[coarse.node_of], priority=_op_priority(problem, coarse, plan)
    )


def _op_priority(problem: Problem, coarse: Coarse, plan: Plan) -> FloatArray | None:
    node_priority = plan.priority
    if plan.by_device is not None:
        node_priority = np.empty(coarse.graph.num_ops)
        for nodes in plan.by_device:
            node_priority[nodes] = np.arange(len(nodes))
    if node_priority is None or not len(node_priority):
        return node_priority
    priority = node_priority[coarse.node_of]
    phases_later = problem.graph.op_phase - coarse.graph.op_phase[coarse.node_of]
    is_later = phases_later > 0
    first, last = float(node_priority.min()), float(node_priority.max())
    mirrored = last + (last - first + 1.0) * (phases_later - 1) + (last - priority) + 1.0
    return np.where(is_later, mirrored, priority)


def coarsely(planner: Planner) -> Planner:
    """A planner that plans the coarse problem and expands the plan."""

    def planned(problem: Problem, plan: Plan) -> Plan:
        return _through(planner, coarsened(problem), problem, plan)

    planned.__doc__ = describe_form(planner, "Groups of the whole step")
    return planned


def forward_coarsely(planner: Planner) -> Planner:
    """As `coarsely`, on one node per unit of the forward pass."""

    def planned(problem: Problem, plan: Plan) -> Plan:
        return _through(planner, forward_coarsened(problem), problem, plan)

    planned.__doc__ = describe_form(planner, "Groups of the forward pass")
    return planned


def describe_form(planner: Planner, what: str) -> str:
    """Docstring of a wrapped planner: the graph form that it plans, then its own docstring."""
    return f"{what}: {(planner.__doc__ or '').strip()}"


def fastest_s(problem: Problem) -> FloatArray:
    """Seconds per op on the kind of device that runs it fastest."""
    seconds: FloatArray = problem.costs.op_s.min(axis=0)
    return np.where(np.isfinite(seconds), seconds, 0.0)


def default_units(problem: Problem, op_s: FloatArray, *, joins_gradients: bool = True) -> IntArray:
    """Co-placed units under the usual caps."""
    devices = workers(problem)
    return co_placed(
        problem.graph,
        op_s,
        max_group_s=float(op_s.sum()) / (UNITS_PER_DEVICE * len(devices)),
        max_group_bytes=int(problem.memory_bytes[devices].min()) // MEMORY_PARTS,
        joins_gradients=joins_gradients,
    )


def _through(planner: Planner, coarse: Coarse, problem: Problem, plan: Plan) -> Plan:
    empty = Plan(
        planner=plan.planner, cluster_hash=plan.cluster_hash, claims=plan.claims, notes=plan.notes
    )
    planned = expand(problem, coarse, planner(coarse_problem(problem, coarse), empty))
    return replace(planned, work_hash=plan.work_hash)


def _sent_bytes(costs: Costs, coarse: Coarse) -> LongArray:
    """Bytes that a transfer of each coarse tensor moves.

    The tensors of a storage that leave a node are sent together: as many bytes as they have, but
    those that overlap are not sent twice.
    """
    count = coarse.graph.num_tensors
    inside = np.flatnonzero(coarse.tensor_of >= 0)
    together = np.zeros(count, dtype=np.int64)
    np.add.at(together, coarse.tensor_of[inside], costs.tensor_bytes[inside])
    biggest = largest(costs.tensor_bytes, coarse.tensor_of, count)
    sent: LongArray = np.maximum(biggest, np.minimum(together, coarse.graph.tensor_bytes))
    return sent * coarse.trips


def _sent_s(costs: Costs, coarse: Coarse) -> FloatArray | None:
    if costs.tensor_s is None:
        return None
    return largest(costs.tensor_s, coarse.tensor_of, coarse.graph.num_tensors) * coarse.trips
