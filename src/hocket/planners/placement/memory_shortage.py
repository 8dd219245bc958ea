"""Explain why no plan fits in memory, and find a small change after which one does.

If ops that must share a device need more than every device has, or if the step holds more at its
end than all devices together, no plan can fit, and the message states this. Otherwise it states,
for the plan with the fewest missing bytes, how much each device lacks. Each remedy is planned
before it is offered: the missing memory, less extra memory on a single device (by bisection), or
one more device. Sizes are first rounded up to the precision of the message. The number of repairs
is bounded; for graphs above `MAX_OPS` ops only the given plans are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.base.errors import InputFileError
from hocket.base.units import format_bytes
from hocket.cost.costs import device_rows
from hocket.graph.coarsen import bound_ops
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster, Link
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.memory_fit import Attempt, attempt, memory_split, spread_memory

# Lower bounds on memory: bytes of ops that must share a device, and of the whole step.
#
# An op needs its inputs, outputs and workspace at one instant. Ops that must share a device also
# need, throughout the step, the parameters and states that they own. At its end a step holds every
# persistent tensor. O(ops + reads).


def held_at_end_bytes(graph: Graph) -> int:
    """Lower bound on the bytes on all devices together when the step ends."""
    stays = np.zeros(graph.num_tensors, dtype=np.bool_)
    stays[graph.root_of[graph.is_held]] = True
    return int(graph.held_bytes[stays].sum())


def tie_needs(graph: Graph, tie_of: IntArray) -> LongArray:
    """Per set of tied ops: lower bound on the memory that their device needs."""
    count, root = int(tie_of.max(initial=-1)) + 1, graph.root_of
    before = graph.tensor_producer < 0
    owner = np.where(before, graph.owner_op, -1)
    lives = np.flatnonzero(before & (owner >= 0) & (graph.alias_of < 0))
    always = np.zeros(count, dtype=np.int64)
    np.add.at(always, tie_of[owner[lives]], graph.tensor_bytes[lives])

    made = np.flatnonzero(~before & graph.is_held & (graph.alias_of < 0))
    at_end = always.copy()
    np.add.at(at_end, tie_of[graph.tensor_producer[made]], graph.tensor_bytes[made])

    at_once = np.zeros(count, dtype=np.int64)
    np.maximum.at(at_once, tie_of, _op_bytes(graph, tie_of, np.where(before, owner, -1)[root]))
    least: LongArray = np.maximum(always + at_once, at_end)
    return least


def _op_bytes(graph: Graph, tie_of: IntArray, owner_of_storage: IntArray) -> LongArray:
    """Per op: bytes needed while it runs, without the tensors that its tied ops own.

    Of several views of one storage only the largest is counted, because the others may share its
    bytes.
    """
    size = _least_bytes(graph)
    reader = graph.reader
    owner = owner_of_storage[graph.reads]
    lives_here = (owner >= 0) & (tie_of[owner] == tie_of[reader])
    reader, tensor = reader[~lives_here], graph.reads[~lives_here]
    order = np.lexsort((-size[tensor], graph.root_of[tensor], reader))
    reader, tensor = reader[order], tensor[order]
    storage = graph.root_of[tensor]
    is_largest = np.ones(len(reader), dtype=np.bool_)
    is_largest[1:] = (reader[1:] != reader[:-1]) | (storage[1:] != storage[:-1])
    needed = graph.workspace_bytes.astype(np.int64)
    np.add.at(needed, reader[is_largest], size[tensor[is_largest]])
    made = np.flatnonzero(graph.tensor_producer >= 0)
    np.add.at(needed, graph.tensor_producer[made], graph.held_bytes[made])
    return needed


def _least_bytes(graph: Graph) -> LongArray:
    """Per tensor: least bytes that it takes on a device, as a copy or as a view of its storage.

    An expanded view is larger than its storage, a slice smaller.
    """
    least = graph.tensor_bytes.astype(np.int64)
    base = np.where(graph.alias_of >= 0, graph.alias_of, np.arange(graph.num_tensors))
    while True:
        # Each round doubles the length of the chains that are followed.
        least = np.minimum(least, least[base])
        if np.array_equal(further := base[base], base):
            return least
        base = further


ENLARGEMENTS = 4
"""Number of bisection steps over the extra memory, each with a new repair."""
MAX_OPS = 20_000
"""Number of ops above which repeated repairs would take too long."""


@dataclass(frozen=True)
class Shortage:
    """The memory that is missing for a plan to fit, as text for the user."""

    device: str
    """The device that lacks most."""
    lacking_bytes: int
    """0 if a plan that fits was found after all."""
    message: str
    smallest_change: str
    """A change after which a plan fits, or the least memory needed; empty if none is needed."""


def explain_shortage(problem: Problem, plans: Sequence[Plan]) -> Shortage:
    """Explain the shortage, based on the best of ``plans`` and on attempts to repair it."""
    impossible = _too_large(problem) or _too_much(problem)
    if impossible is not None:
        return impossible
    tried = [attempt(problem, plan) for plan in plans]
    if problem.graph.num_ops <= MAX_OPS or not tried:
        start = plans[0].ordered() if plans else Plan()
        tried.append(attempt(problem, memory_split(problem, start)))
    return _lacking(problem, min(tried, key=Attempt.rank))


# ── no plan can fit ──────────────────────────────────────────────────────────────────────────


def _too_large(problem: Problem) -> Shortage | None:
    """Shortage of ops that must share a device and need more than any device has; else None."""
    graph, memory = problem.graph, problem.memory_bytes
    tie_of = bound_ops(graph)
    needs = tie_needs(graph, tie_of)
    largest, device = int(np.argmax(needs)), int(np.argmax(memory))
    lacking = int(needs[largest] - memory[device])
    if lacking <= 0:
        return None
    ops = np.flatnonzero(tie_of == largest)
    together = " with what must sit with it" if len(ops) > 1 else ""
    name = problem.cluster.device_names[device]
    headroom = problem.cluster.devices[device].memory_bytes - int(memory[device])
    beside = f" beside a headroom of {format_bytes(headroom)}" if headroom else ""
    need = _rounded_up(int(needs[largest]))
    return Shortage(
        name,
        lacking,
        f"op {graph.op_names[ops[0]]!r}{together} needs {format_bytes(int(needs[largest]))}, "
        f"the largest device, {name}, has {format_bytes(int(memory[device]))}{beside}",
        f"nothing smaller than a device with {format_bytes(need)} free can help",
    )


def _too_much(problem: Problem) -> Shortage | None:
    """Shortage of a step that holds more at its end than all devices have; else None."""
    held, total = held_at_end_bytes(problem.graph), int(problem.memory_bytes.sum())
    if held <= total:
        return None
    name = problem.cluster.device_names[int(np.argmax(problem.memory_bytes))]
    return Shortage(
        name,
        held - total,
        f"the step holds at least {format_bytes(held)} at its end, all devices together have "
        f"{format_bytes(total)}",
        f"at least {format_bytes(_rounded_up(held - total))} more memory is needed",
    )


# ── missing bytes of the best plan, and remedies ────────────────────────────────────────────────


def _lacking(problem: Problem, best: Attempt) -> Shortage:
    over = np.maximum(best.timeline.peak_bytes - problem.memory_bytes, 0)
    worst = int(np.argmax(over))
    name, peak = problem.cluster.device_names[worst], int(best.timeline.peak_bytes[worst])
    message = (
        f"{name} lacks {format_bytes(int(over[worst]))} of the {format_bytes(peak)} it needs in "
        f"the plan that lacks least ({best.plan.planner or 'memory-split'})"
    )
    if not over[worst]:
        return Shortage(name, 0, f"{best.plan.planner or 'memory-split'} fits", "")
    changes = [_more_memory(problem, best, over), _one_more(problem, best)]
    change = " or ".join(part for part in changes if part)
    return Shortage(name, int(over[worst]), message, f"it would fit {change}")


def _more_memory(problem: Problem, best: Attempt, over: LongArray) -> str:
    """Describe the extra memory needed on every device or, if less in all, on one device only."""
    names, worst = problem.cluster.device_names, int(np.argmax(over))
    extra = {int(device): _rounded_up(int(over[device])) for device in np.flatnonzero(over)}
    alone = _smallest_extra(problem, best.plan, worst, sum(extra.values()))
    if alone is not None:
        extra = {worst: alone}
    parts = [f"{format_bytes(size)} more on {names[device]}" for device, size in extra.items()]
    return f"with {' and '.join(parts)}"


def _smallest_extra(problem: Problem, plan: Plan, device: int, most: int) -> int | None:
    """Smallest tried extra bytes on one device with which a plan fits; None if none does."""
    most = _rounded_up(most)
    if problem.graph.num_ops > MAX_OPS or not _fits(_enlarged(problem, device, most), plan):
        return None
    low, high = 0, most
    for _ in range(ENLARGEMENTS):
        middle = _rounded_up((low + high) // 2)
        if not low < middle < high:
            break
        if _fits(_enlarged(problem, device, middle), plan):
            high = middle
        else:
            low = middle
    return high


def _one_more(problem: Problem, best: Attempt) -> str:
    """Describe one more device of the most frequent type, if the step then fits; else empty."""
    kinds = [device.kind.name for device in problem.cluster.devices if not device.kind.is_cpu]
    if not kinds or problem.graph.num_ops > MAX_OPS:
        return ""
    kind = max(kinds, key=kinds.count)
    cluster = _with_twin(problem.cluster, kind)
    try:
        routes = cluster.routes
    except InputFileError:  # devices joined pair by pair: no link leads from one to its twin
        return ""
    costs = replace(problem.costs, device_row=device_rows(cluster), routes=routes)
    larger = replace(problem, cluster=cluster, op_costs=costs)
    start = replace(best.plan, cluster_hash="").ordered(priority=best.plan.priority)
    fits = _fits(larger, start) or attempt(larger, memory_split(larger, start)).overflow_bytes == 0
    return f"with one more {kind}" if fits else ""


def _fits(problem: Problem, plan: Plan) -> bool:
    return attempt(problem, spread_memory(problem, plan)).overflow_bytes == 0


def _enlarged(problem: Problem, device: int, extra_bytes: int) -> Problem:
    devices = list(problem.cluster.devices)
    memory_bytes = devices[device].memory_bytes + extra_bytes
    devices[device] = replace(devices[device], memory_bytes=memory_bytes)
    return replace(problem, cluster=replace(problem.cluster, devices=tuple(devices)))


def _with_twin(cluster: Cluster, kind: str) -> Cluster:
    """Return the cluster with a copy of the first device of a type, with the same links."""
    model = next(device for device in cluster.devices if device.kind.name == kind)
    twin = replace(model, name=f"another {model.name}")
    links: list[Link] = []
    for link in cluster.links:
        links.append(link)
        if model.name not in link.ends:
            continue
        if link.is_bus:
            links[-1] = replace(link, ends=(*link.ends, twin.name))
            continue
        ends = tuple(twin.name if end == model.name else end for end in link.ends)
        links.append(replace(link, name=f"another {link.name}", ends=ends))
    return replace(cluster, devices=(*cluster.devices, twin), links=tuple(links))


def _rounded_up(size_bytes: int) -> int:
    """Smallest size not below the given one that `format_bytes` shows without rounding."""
    unit = 1
    while size_bytes >= 1024 * unit:
        unit *= 1024
    if unit == 1:
        return size_bytes
    return math.ceil(math.ceil(size_bytes / unit * 10) / 10 * unit)
