"""Plan on a coarse graph: shrink the problem, plan it, and expand the plan to all ops.

`coarsely` wraps a planner: it plans the fused graph of co-placed units, and every op is placed with
its node. O(ops + reads), plus the planner.

`better_form` runs a planner on three forms of the graph and keeps the best plan: groups of the
forward pass, groups of the whole step, and single ops. Groups of the forward pass keep weights with
their readers and backward ops with the data they need, and make a graph small; but a group runs on
one device, and where branches meet it may contain all of them, which leaves nothing to run in
parallel. Groups of the whole step place backward ops independently of forward ops. No form is best
everywhere (on generated graphs each takes up to twice as long as another), so all three are planned
and the simulator chooses. On large graphs, where a second plan takes long, only one is planned:
single ops if groups make the longest path much longer than the work requires, else groups of the
forward pass. O(the three planners), plus three simulations.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.base.errors import NoFeasiblePlanError
from hocket.cost.costs import Costs
from hocket.graph.coarsen import Coarse, co_placed, forward_only, fuse
from hocket.graph.coarsen.nodes import largest
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.devices import workers
from hocket.planners.order.levels import levels
from hocket.planners.shared import Planner, is_large, once_per_problem
from hocket.simulate.engine import simulate

UNITS_PER_DEVICE = 8
"""Cap on a unit's time: one of this many equal parts of a device's fair load.

Small units let the loads be balanced.
"""
MEMORY_PARTS = 4
"""Cap on a unit's bytes: one of this many equal parts of the smallest device's memory."""


@once_per_problem
def coarsened(problem: Problem) -> Coarse:
    """Return the fused graph of co-placed units under the default caps."""
    op_s = fastest_s(problem)
    return fuse(problem.graph, default_units(problem, op_s), op_s)


@once_per_problem
def forward_coarsened(problem: Problem) -> Coarse:
    """Return a graph with one node per co-placed unit of the forward pass, under the default caps.

    Each node includes the backward and optimizer ops of its unit.
    """
    op_s = fastest_s(problem)
    # A gradient that several nodes add to is passed along them, at a cost that planners see; tying
    # them would make one node of all time steps of a layer, which nothing could overlap.
    units = default_units(problem, op_s, joins_gradients=False)
    return forward_only(problem.graph, units, op_s)


def coarse_problem(problem: Problem, coarse: Coarse) -> Problem:
    """Return the same problem stated for the coarse graph."""
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
    """Turn a plan of the coarse problem into a plan of the problem itself.

    Ops are placed where their node was placed. An order or priorities of nodes become priorities of
    ops, in which ops of one node keep their order; if a node of the forward pass includes ops of
    later phases, these come after all forward ops, in the mirrored order of the nodes.
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
    # Backward ops follow in mirrored order of the nodes, one band of values per later phase.
    phases_later = problem.graph.op_phase - coarse.graph.op_phase[coarse.node_of]
    is_later = phases_later > 0
    first, last = float(node_priority.min()), float(node_priority.max())
    mirrored = last + (last - first + 1.0) * (phases_later - 1) + (last - priority) + 1.0
    return np.where(is_later, mirrored, priority)


def coarsely(planner: Planner) -> Planner:
    """Return a planner that plans the coarse problem and expands the plan."""

    def planned(problem: Problem, plan: Plan) -> Plan:
        return _through(planner, coarsened(problem), problem, plan)

    planned.__doc__ = describe_form(planner, "Groups of the whole step")
    return planned


def forward_coarsely(planner: Planner) -> Planner:
    """Return a planner that plans one node per unit of the forward pass and expands the plan."""

    return lambda problem, plan: _through(planner, forward_coarsened(problem), problem, plan)


def describe_form(planner: Planner, what: str) -> str:
    """Return the docstring of a wrapped planner: the form of the graph, then its own docstring."""
    return f"{what}: {(planner.__doc__ or '').strip()}"


def fastest_s(problem: Problem) -> FloatArray:
    """Per op: seconds on the device type that runs it fastest; 0 if no device can run it."""
    seconds: FloatArray = problem.costs.op_s.min(axis=0)
    return np.where(np.isfinite(seconds), seconds, 0.0)


def default_units(problem: Problem, op_s: FloatArray, *, joins_gradients: bool = True) -> IntArray:
    """Return the co-placement unit of each op under the default caps on time and bytes."""
    devices = workers(problem)
    return co_placed(
        problem.graph,
        op_s,
        max_group_s=float(op_s.sum()) / (UNITS_PER_DEVICE * len(devices)),
        max_group_bytes=int(problem.memory_bytes[devices].min()) // MEMORY_PARTS,
        joins_gradients=joins_gradients,
    )


def _through(planner: Planner, coarse: Coarse, problem: Problem, plan: Plan) -> Plan:
    # Sections of the given plan refer to ops, not nodes, so the planner starts without them.
    empty = Plan(
        planner=plan.planner, cluster_hash=plan.cluster_hash, claims=plan.claims, notes=plan.notes
    )
    planned = expand(problem, coarse, planner(coarse_problem(problem, coarse), empty))
    return replace(planned, work_hash=plan.work_hash)


def _sent_bytes(costs: Costs, coarse: Coarse) -> LongArray:
    """Bytes that a transfer of each coarse tensor moves.

    Tensors of one storage that leave a node are sent together: the sum of their bytes, limited to
    the bytes of the storage, because tensors may overlap.
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


_HIDDEN = 1.5
"""Single ops are planned if the shortest step of groups is this many times that of single ops."""


def better_form(planner: Planner) -> Planner:
    """Return a planner that tries both forms of groups and single ops and keeps the best plan."""
    on_groups, on_step = forward_coarsely(planner), coarsely(planner)

    @wraps(planner)
    def planned(problem: Problem, plan: Plan) -> Plan:
        if is_large(problem.graph.num_ops):
            return (
                planner(problem, plan) if hides_parallelism(problem) else on_groups(problem, plan)
            )
        return _better(problem, plan, {"groups": on_groups, "ops": planner, "step": on_step})

    planned.__doc__ = describe_form(planner, "The best of groups and single ops")
    return planned


def hides_parallelism(problem: Problem) -> bool:
    """True if the longest path or the work of groups makes their step much longer than needed."""
    work_s = float(fastest_s(problem).sum()) / len(workers(problem))
    coarse = coarse_problem(problem, forward_coarsened(problem))
    return max(_path_s(coarse), work_s) > _HIDDEN * max(_path_s(problem), work_s)


def _path_s(problem: Problem) -> float:
    """Seconds of the longest path with all ops on the first worker, so without transfers."""
    alone = np.full(problem.graph.num_ops, workers(problem)[0], dtype=np.int32)
    return float(levels(problem, alone).to_end_s.max(initial=0.0))


def _better(problem: Problem, plan: Plan, forms: dict[str, Planner]) -> Plan:
    found: list[tuple[tuple[int, float], int, Plan]] = []
    refusal = None
    # One form may not fit where another does: only a refusal of all forms is an error.
    for name, planner in forms.items():
        try:
            made = planner(problem, plan)
        except NoFeasiblePlanError as error:
            refusal = refusal or error
            continue
        made = made.claiming(form=name)
        found.append((_rank(problem, made), len(found), made))
    if not found and refusal is not None:
        raise refusal
    return min(found)[-1]


def _rank(problem: Problem, plan: Plan) -> tuple[int, float]:
    """Sort key: missing bytes summed over devices, then the step time."""
    timeline = simulate(problem, plan)
    lacking = np.maximum(timeline.peak_bytes - problem.memory_bytes, 0)
    return int(lacking.sum()), timeline.makespan_s
