"""Number the ops by their longest path to the end before a planner sees them.

Planners break ties, and devices choose among ready ops, by op number. In the order of the longest
path to the end (the classical priority of list scheduling) these choices are better than in the
order in which a file happens to list the ops, and depend less on that order. `by_longest_path`
wraps a planner and maps the plan back to the original numbers afterwards. O(reads log reads) in
numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np

from hocket.base.arrays import IntArray, LongArray, pointers, positions
from hocket.graph.graph import Graph, StatedTimes
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.order.levels import longest_paths
from hocket.planners.placement.coarse import fastest_s
from hocket.planners.shared import Planner, is_large, once_per_problem


@dataclass(frozen=True, eq=False)
class Renumbered:
    """A problem with renumbered ops, and the mapping to the original numbers."""

    problem: Problem
    order: LongArray
    """Per new op number: the original number."""
    rank: LongArray
    """Per original op number: the new number."""

    def to_renumbered(self, plan: Plan) -> Plan:
        """Map a plan of the original problem to the renumbered one."""
        plan = replace(plan, work_hash="")
        if plan.device_of is None:
            return plan
        priority = plan.priority
        if plan.by_device is None and priority is None:
            # Without priorities the op numbers decide, and these change.
            priority = np.arange(len(self.order), dtype=np.float64)
        return plan.placing(
            plan.device_of[self.order],
            priority=None if priority is None else priority[self.order],
            by_device=_mapped(plan.by_device, self.rank),
        )

    def to_original(self, plan: Plan, work_hash: str) -> Plan:
        """Map a plan of the renumbered problem back to the original one.

        Equal priorities are made distinct, because op numbers break ties and differ between the
        two.
        """
        assert plan.device_of is not None, "a plan is mapped back after its placement"
        device_of = plan.device_of[self.rank]
        plan = replace(plan, work_hash=work_hash)
        if plan.by_device is not None:
            return plan.placing(device_of, by_device=_mapped(plan.by_device, self.order))
        by = np.zeros(len(self.order)) if plan.priority is None else plan.priority
        priority = positions(np.argsort(by, kind="stable"))[self.rank].astype(np.float64)
        return plan.placing(device_of, priority=priority)


def by_longest_path(planner: Planner) -> Planner:
    """Return a planner that sees the ops in the order of their longest path to the end."""

    @wraps(planner)
    def planned(problem: Problem, plan: Plan) -> Plan:
        # Large graphs keep their order: a second copy of the problem takes long.
        if problem.graph.num_ops <= 1 or is_large(problem.graph.num_ops):
            return planner(problem, plan)
        there = renumbered(problem)
        if there is None:
            return planner(problem, plan)
        start = there.to_renumbered(plan)
        made = planner(there.problem, start)
        return plan if made is start else there.to_original(made, plan.work_hash)

    return planned


@once_per_problem
def renumbered(problem: Problem) -> Renumbered | None:
    """Return the problem with ops in the order of longest paths.

    None if a tensor that exists before the step would get another owner: its first reader owns
    it.
    """
    graph = problem.graph
    to_end_s = longest_paths(graph, fastest_s(problem))
    # Ops that take no time tie with their readers; fewer hops to the end keep the order
    # topological.
    hops = longest_paths(graph, np.ones(graph.num_ops))
    there = in_order(problem, np.lexsort((np.arange(graph.num_ops), -hops, -to_end_s)))
    tensors = _tensor_order(graph, there.rank)
    owners = np.append(there.rank, -1)[graph.owner_op[tensors]]
    return there if np.array_equal(owners, there.problem.graph.owner_op) else None


def in_order(problem: Problem, order: LongArray) -> Renumbered:
    """Return the problem with its ops in the given topological order."""
    costs, rank = problem.costs, positions(order)
    tensors = _tensor_order(problem.graph, rank)
    inside = replace(
        costs,
        op_s=np.ascontiguousarray(costs.op_s[:, order]),
        op_source=np.ascontiguousarray(costs.op_source[:, order]),
        tensor_bytes=costs.tensor_bytes[tensors],
        tensor_s=None if costs.tensor_s is None else costs.tensor_s[tensors],
    )
    graph = _graph(problem.graph, order, rank, tensors)
    return Renumbered(replace(problem, work=graph, op_costs=inside), order, rank)


def _tensor_order(graph: Graph, rank: LongArray) -> LongArray:
    """Tensors by the new number of their producer; those that exist before the step come first."""
    # The appended -1 maps "no producer" to itself.
    return np.argsort(np.append(rank, -1)[graph.tensor_producer], kind="stable")


def _graph(graph: Graph, order: LongArray, rank: LongArray, tensors: LongArray) -> Graph:
    """Return the same graph with ops and tensors renumbered."""
    per_op = ("op_kind", "op_module", "op_signature", "op_phase", "op_dtype", "flops",
              "bytes_touched", "workspace_bytes", "rng_order", "op_stream", "group")  # fmt: skip
    tensor_rank = np.append(positions(tensors), -1).astype(np.int32)
    reads = tensor_rank[graph.reads]
    by_reader = np.lexsort((reads, np.repeat(rank, np.diff(graph.read_ptr))))
    columns: dict[str, Any] = {name: getattr(graph, name)[order] for name in per_op}
    return replace(
        graph,
        **columns,
        op_names=tuple(graph.op_names[op] for op in order.tolist()),
        partner=np.append(rank, -1)[graph.partner[order]].astype(np.int32),
        tensor_names=tuple(graph.tensor_names[tensor] for tensor in tensors.tolist()),
        tensor_bytes=graph.tensor_bytes[tensors],
        tensor_role=graph.tensor_role[tensors],
        tensor_producer=np.append(rank, -1)[graph.tensor_producer[tensors]].astype(np.int32),
        alias_of=tensor_rank[graph.alias_of[tensors]],
        read_ptr=pointers(np.diff(graph.read_ptr)[order]),
        reads=reads[by_reader],
        stated=_stated(graph.stated, order, tensors),
    )


def _stated(stated: StatedTimes | None, order: LongArray, tensors: LongArray) -> StatedTimes | None:
    """Return the stated times in the new order.

    They decide which ops do work, and so which ops are placed together.
    """
    if stated is None:
        return None
    tensor_s = None if stated.tensor_s is None else stated.tensor_s[tensors]
    op_s = {kind: seconds[order] for kind, seconds in stated.op_s.items()}
    return StatedTimes(op_s=op_s, tensor_s=tensor_s)


def _mapped(order: tuple[IntArray, ...] | None, to: LongArray) -> tuple[IntArray, ...] | None:
    return None if order is None else tuple(to[ops].astype(np.int32) for ops in order)
