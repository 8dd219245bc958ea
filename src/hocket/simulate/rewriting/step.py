"""A rewritten step as a problem: the same cluster, with times for the ops that the rewrite added.

Recomputed ops take the time of their first run. Ops in chunks take their fraction of the time, but
at least one launch. Copies take the bandwidth of the route to the host, and host updates that of
host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.cost.costs import Costs
from hocket.graph.graph import Graph, Phase, Role, Stream
from hocket.hardware.host_route import HostRoute, host_route
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Memory
from hocket.plan.verify import require_structure
from hocket.simulate.rewriting.rewrite import Rewritten, rewrite
from hocket.simulate.rewriting.uses import Uses

_WORKS_IN = {"optimizer.adamw": 2, "optimizer.adam": 2}
"""Number of temporary tensors of a parameter's size in PyTorch's unfused updates: root and
quotient."""


@dataclass(frozen=True, eq=False)
class BudgetedStep:
    """A rewritten step as a problem, and the plan that runs it in the order of the rewrite."""

    problem: Problem
    plan: Plan
    rewritten: Rewritten
    host_bytes: int
    """Bytes of host-resident parameters and optimizer state."""


def budgeted(
    problem: Problem,
    plan: Plan,
    memory: Memory,
    *,
    uses: Uses | None = None,
) -> BudgetedStep:
    """Return the step of a placed problem with the copies and recompute of a memory plan."""
    done = rewrite(problem.graph, memory, uses)
    assert plan.device_of is not None, "memory is planned for ops that have a place"
    device_of = plan.device_of[done.neighbor]
    done = _with_update_work(problem, done, device_of)
    costs = _costs(problem, done)
    new = replace(problem, work=done.graph, op_costs=costs)
    num_devices = problem.cluster.num_devices
    order = tuple(
        np.flatnonzero(device_of == device).astype(np.int32) for device in range(num_devices)
    )
    placed = Plan(
        planner=plan.planner, work_hash=new.work_hash, cluster_hash=plan.cluster_hash
    ).placing(device_of.astype(np.int32), by_device=order)
    # What left the device is on the host, except for the reserved buffers.
    away = _persistent_bytes(problem.graph) - _persistent_bytes(done.graph) + done.reserved_bytes
    return BudgetedStep(new, placed, done, away)


def rewritten_step(problem: Problem, plan: Plan) -> tuple[Problem, Plan]:
    """Return the rewritten step and its plan; without a memory section, both unchanged."""
    memory = plan.get(Memory)
    if memory is None:
        return problem, plan
    # Files are shown and simulated without being verified first.
    require_structure(plan, problem)
    step = budgeted(problem, plan.without(Memory), memory)
    return step.problem, replace(step.plan, claims=plan.claims, notes=plan.notes)


def _persistent_bytes(graph: Graph) -> int:
    return int(graph.held_bytes[graph.tensor_producer < 0].sum())


def _with_update_work(problem: Problem, done: Rewritten, device_of: IntArray) -> Rewritten:
    """Return the step with workspaces of updates on CPUs; fused updates need none."""
    given, graph = problem.graph, done.graph
    is_cpu = np.array([device.kind.is_cpu for device in problem.cluster.devices])
    is_update = (graph.op_phase == Phase.OPTIMIZER) & (done.origin >= 0)
    chosen = np.flatnonzero(is_update & (graph.op_stream != Stream.HOST) & is_cpu[device_of])
    if not len(chosen):
        return done
    work = graph.workspace_bytes.copy()
    for op in chosen.tolist():
        origin = int(done.origin[op])
        reads = given.reads_of(origin)
        own = given.tensor_bytes[reads[given.tensor_role[reads] == Role.PARAMETER]].sum()
        work[op] += int(_WORKS_IN.get(given.kind_of(origin), 0) * own * done.share[op])
    return replace(done, graph=replace(graph, workspace_bytes=work))


def _costs(problem: Problem, done: Rewritten) -> Costs:
    old, graph = problem.costs, done.graph
    origin = np.maximum(done.origin, 0)
    op_s = old.op_s[:, origin] * done.share
    for row, kind in enumerate(problem.cluster.kinds):
        device = next(d for d in problem.cluster.devices if d.kind.name == kind.name)
        # A chunk cannot take less than the launch of its kernel.
        in_parts = (done.share < 1) & (op_s[row] > 0)
        op_s[row] = np.where(in_parts, np.maximum(op_s[row], kind.launch_s), op_s[row])
        _price_copies(op_s[row], done, host_route(problem.cluster, device))
    host_resident = graph.op_stream == Stream.HOST
    op_s[:, host_resident] = graph.bytes_touched[host_resident] / problem.cluster.host_update_bps
    return replace(
        old,
        op_s=op_s,
        op_source=old.op_source[:, origin],
        tensor_bytes=graph.tensor_bytes,
        tensor_s=None,
    )


def _price_copies(op_s: FloatArray, done: Rewritten, link: HostRoute) -> None:
    stream, is_copy = done.graph.op_stream, done.origin < 0
    for direction, rate_bps in ((Stream.COPY_IN, link.in_bps), (Stream.COPY_OUT, link.out_bps)):
        chosen = is_copy & (stream == direction)
        op_s[chosen] = link.latency_s + done.moved_bytes[chosen] / rate_bps


def moved_bytes(done: Rewritten) -> tuple[int, int]:
    """Return the bytes copied to the host and from the host in one step."""
    stream: IntArray = done.graph.op_stream.astype(np.int32)
    to_host = int(done.moved_bytes[stream == Stream.COPY_OUT].sum())
    return to_host, int(done.moved_bytes[stream == Stream.COPY_IN].sum())
