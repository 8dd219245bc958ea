"""Planning by structure: ties go by what ops are and what they are joined to, not by the file.

Planners break ties by the position of ops, so that the same graph written in another order gets
another plan (m-ETF's up to twice as long). Here ops are numbered anew before a planner sees them:
by the longest path to the end, then by a label of the op and its neighbourhood (rounds of
Weisfeiler and Leman, 1968); the position in the file decides between ops that look the same only.
The plan is mapped back to the original numbering afterwards. O(reads log reads) in numpy, once per
problem.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers, positions
from hocket.graph.graph import Graph, StatedTimes
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.coarse import fastest_s
from hocket.planners.shared import Planner, is_large, once_per_problem

_ROUNDS = 3
"""Hops that a label covers; path lengths to the end and from the start cover the rest."""

_Labels = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Renumbered:
    """A problem whose ops are numbered by structure."""

    problem: Problem
    order: LongArray
    """The op of the given problem at each position."""
    rank: LongArray
    """The position of each op of the given problem."""
    tensors: LongArray
    """The tensor of the given problem at each position."""

    def to_renumbered(self, plan: Plan) -> Plan:
        """Map a plan of the given problem to the renumbered one."""
        plan = replace(plan, work_hash="")
        if plan.device_of is None:
            return plan
        priority = plan.priority
        if plan.by_device is None and priority is None:
            priority = np.arange(len(self.order), dtype=np.float64)
        return plan.placing(
            plan.device_of[self.order],
            priority=None if priority is None else priority[self.order],
            by_device=_mapped(plan.by_device, self.rank),
        )

    def to_original(self, plan: Plan, work_hash: str) -> Plan:
        """Map a plan of the renumbered problem back to the given one.

        Equal priorities are made distinct: op numbers break ties, and they differ between the two.
        """
        assert plan.device_of is not None, "a plan is mapped back after its placement"
        device_of = plan.device_of[self.rank]
        plan = replace(plan, work_hash=work_hash)
        if plan.by_device is not None:
            return plan.placing(device_of, by_device=_mapped(plan.by_device, self.order))
        by = np.zeros(len(self.order)) if plan.priority is None else plan.priority
        priority = positions(np.argsort(by, kind="stable"))[self.rank].astype(np.float64)
        return plan.placing(device_of, priority=priority)


def by_structure(planner: Planner) -> Planner:
    """A planner whose ties do not depend on the order of ops in the file."""

    @wraps(planner)
    def planned(problem: Problem, plan: Plan) -> Plan:
        # Large graphs keep the order of the file: planning them twice over takes long.
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
    """The problem with its ops numbered by structure.

    Tensors that exist before the step are owned by their first reader, so the new order must keep
    each first reader first. None where that is impossible.
    """
    graph = problem.graph
    to_end_s, from_start_s = _paths(graph, fastest_s(problem))
    to_end, _ = _paths(graph, np.ones(graph.num_ops))
    op_label, tensor_label = _labels(problem, to_end_s, from_start_s)
    # Along every edge the path to the end gets shorter, or where ops take no time its hops do.
    order = np.lexsort((op_label, -to_end, -to_end_s))
    there = in_order(problem, order, tensor_label)
    if _keeps_owners(graph, there):
        return there
    there = in_order(problem, _owners_first(graph, there.rank), tensor_label)
    return there if _keeps_owners(graph, there) else None


def _keeps_owners(graph: Graph, there: Renumbered) -> bool:
    """True if every tensor has the same owner op as in the original numbering."""
    owners = np.append(there.rank, -1)[graph.owner_op[there.tensors]]
    return bool(np.array_equal(owners, there.problem.graph.owner_op))


def _owners_first(graph: Graph, rank: LongArray) -> LongArray:
    """The topological order nearest to ``rank`` in which first readers stay the first."""
    reader = graph.reader
    owner = graph.owner_op[graph.reads]
    shared = np.flatnonzero(
        (graph.tensor_producer[graph.reads] < 0) & (owner >= 0) & (owner < reader)
    )
    src = np.concatenate((graph.edges[0], owner[shared]))
    dst = np.concatenate((graph.edges[1], reader[shared]))
    followers = np.split(
        dst[np.argsort(src, kind="stable")],
        np.cumsum(np.bincount(src, minlength=graph.num_ops))[:-1],
    )
    waits = np.bincount(dst, minlength=graph.num_ops)
    ready = [(int(rank[op]), op) for op in np.flatnonzero(waits == 0).tolist()]
    heapq.heapify(ready)
    order = []
    while ready:
        op = heapq.heappop(ready)[1]
        order.append(op)
        for follower in followers[op].tolist():
            waits[follower] -= 1
            if waits[follower] == 0:
                heapq.heappush(ready, (int(rank[follower]), follower))
    return np.array(order)


def in_order(problem: Problem, order: LongArray, tensor_key: NDArray[Any]) -> Renumbered:
    """The problem with its ops in a topological order, the tensors of each op by their key."""
    graph, costs, rank = problem.graph, problem.costs, positions(order)
    producer = np.append(rank, -1)[graph.tensor_producer]
    tensors = np.lexsort((tensor_key, producer))
    inside = replace(
        costs,
        op_s=np.ascontiguousarray(costs.op_s[:, order]),
        op_source=np.ascontiguousarray(costs.op_source[:, order]),
        tensor_bytes=costs.tensor_bytes[tensors],
        tensor_s=None if costs.tensor_s is None else costs.tensor_s[tensors],
    )
    made = _graph(graph, order, rank, tensors, producer)
    return Renumbered(replace(problem, work=made, op_costs=inside), order, rank, tensors)


def _graph(
    graph: Graph, order: LongArray, rank: LongArray, tensors: LongArray, producer: LongArray
) -> Graph:
    """The same graph in another order."""
    per_op = ("op_kind", "op_module", "op_signature", "op_phase", "op_dtype", "flops",
              "bytes_touched", "workspace_bytes", "rng_order", "op_stream")  # fmt: skip
    tensor_rank = np.append(positions(tensors), -1).astype(np.int32)
    reader = np.repeat(rank, np.diff(graph.read_ptr))
    reads = tensor_rank[graph.reads]
    by_reader = np.lexsort((reads, reader))
    columns: dict[str, Any] = {name: getattr(graph, name)[order] for name in per_op}
    return replace(
        graph,
        **columns,
        op_names=tuple(graph.op_names[op] for op in order.tolist()),
        partner=np.append(rank, -1)[graph.partner[order]].astype(np.int32),
        group=_numbered(graph.group[order]),
        tensor_names=tuple(graph.tensor_names[tensor] for tensor in tensors.tolist()),
        tensor_bytes=graph.tensor_bytes[tensors],
        tensor_role=graph.tensor_role[tensors],
        tensor_producer=producer[tensors].astype(np.int32),
        alias_of=tensor_rank[graph.alias_of[tensors]],
        read_ptr=pointers(np.diff(graph.read_ptr)[order]),
        reads=reads[by_reader],
        stated=_stated(graph, order, tensors),
    )


def _stated(graph: Graph, order: LongArray, tensors: LongArray) -> StatedTimes | None:
    """Stated times in the new order: they tell which ops work, and so what is co-placed."""
    if graph.stated is None:
        return None
    op_s, tensor_s = graph.stated.op_s, graph.stated.tensor_s
    return StatedTimes(
        op_s={kind: seconds[order] for kind, seconds in op_s.items()},
        tensor_s=None if tensor_s is None else tensor_s[tensors],
    )


def _paths(graph: Graph, op_s: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Per op, the longest paths to the end and from the start, without transfers."""
    from hocket.planners.order.levels import Placed, fill_levels

    nowhere = table(np.zeros((1, 1)), np.float64)
    placed = Placed(
        device=table(np.zeros(graph.num_ops), np.int64),
        duration_s=table(op_s, np.float64),
        made_ptr=table(graph.made_ptr, np.int64),
        user_ptr=table(graph.user_ptr, np.int64),
        users=table(graph.users, np.int64),
        work=table(np.zeros(graph.num_tensors), np.float64),
        latency_s=nowhere,
        unit_s=nowhere,
    )
    to_end_s, from_start_s = np.zeros(graph.num_ops), np.zeros(graph.num_ops)
    fill_levels(placed, to_end_s, from_start_s)
    return to_end_s, from_start_s


# ── labels ───────────────────────────────────────────────────────────────────────────────────────


def _labels(
    problem: Problem, to_end_s: FloatArray, from_start_s: FloatArray
) -> tuple[_Labels, _Labels]:
    """Numbers that are equal for ops, and for tensors, that look the same."""
    graph, costs = problem.graph, problem.costs
    op = _mixed(
        to_end_s, from_start_s, *costs.op_s, graph.workspace_bytes, graph.op_phase, graph.op_dtype,
        graph.flops, graph.group >= 0, graph.rng_order >= 0,
    )  # fmt: skip
    work = costs.tensor_bytes if costs.tensor_s is None else costs.tensor_s
    tensor = _mixed(graph.tensor_bytes, graph.tensor_role, work, graph.is_held)
    reader = graph.reader
    made = np.flatnonzero(graph.tensor_producer >= 0)
    for _ in range(_ROUNDS):
        seen = _sums(_mixed(tensor[graph.reads]), reader, graph.num_ops)
        given = _sums(_mixed(tensor[made], np.ones(len(made))), graph.tensor_producer[made],
                      graph.num_ops)  # fmt: skip
        tied = _sums(op, graph.group, int(graph.group.max(initial=-1)) + 1)
        of_partner = _sums(_mixed(op)[graph.partner >= 0], np.flatnonzero(graph.partner >= 0),
                           graph.num_ops)  # fmt: skip
        used = _sums(_mixed(op[reader]), graph.reads, graph.num_tensors)
        maker, base = np.append(op, 0)[graph.tensor_producer], np.append(tensor, 0)[graph.alias_of]
        op = _mixed(op, seen, given, np.append(tied, 0)[graph.group], of_partner)
        tensor = _mixed(tensor, used, maker, base)
    return op, tensor


def _mixed(*columns: NDArray[Any]) -> _Labels:
    """One number per row, as good as random (the finaliser of SplitMix64, column by column)."""
    label = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        is_label = column.dtype == np.uint64
        bits = column if is_label else column.astype(np.float64).view(np.uint64)
        label = (label ^ bits) + np.uint64(0x9E3779B97F4A7C15)
        label = (label ^ (label >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        label = (label ^ (label >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        label ^= label >> np.uint64(31)
    return label


def _sums(labels: _Labels, where: NDArray[Any], count: int) -> _Labels:
    """Sums of labels, whose order does not matter; what belongs nowhere is left out."""
    total = np.zeros(count, dtype=np.uint64)
    inside = where >= 0
    np.add.at(total, where[inside], labels[inside])
    return total


# ── numbers ──────────────────────────────────────────────────────────────────────────────────────


def _numbered(group: IntArray) -> IntArray:
    """Groups numbered as they first appear."""
    found, first, at = np.unique(group, return_index=True, return_inverse=True)
    number = np.empty(len(found), dtype=np.int32)
    number[np.argsort(np.where(found < 0, -1, first), kind="stable")] = np.arange(len(found))
    return number[at] - np.int32(found.size > 0 and found[0] < 0)


def _mapped(order: tuple[IntArray, ...] | None, to: LongArray) -> tuple[IntArray, ...] | None:
    return None if order is None else tuple(to[ops].astype(np.int32) for ops in order)
