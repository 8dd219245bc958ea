"""Explain why no plan fits in memory, and how much more memory would be enough.

If ops that must share a device need more than every device has, or if the step holds more at its
end than all devices together, no plan can fit, and the message states this. Otherwise it states,
for the plan with the fewest missing bytes, how much each device lacks; with that much more memory
this plan fits. Sizes are rounded up to the precision of the message. On graphs above `MAX_OPS` ops
only the given plans are used, because a new split would take long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.base.units import format_bytes
from hocket.graph.coarsen import bound_ops
from hocket.graph.graph import Graph
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.memory_fit import Attempt, attempt, memory_split

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

    Views that it reads are not counted: they may share bytes with each other.
    """
    owner = owner_of_storage[graph.reads]
    is_elsewhere = (owner < 0) | (tie_of[owner] != tie_of[graph.reader])
    needed = graph.workspace_bytes.astype(np.int64)
    np.add.at(needed, graph.reader[is_elsewhere], graph.held_bytes[graph.reads[is_elsewhere]])
    made = np.flatnonzero(graph.tensor_producer >= 0)
    np.add.at(needed, graph.tensor_producer[made], graph.held_bytes[made])
    return needed


MAX_OPS = 20_000
"""Number of ops above which no new split is made for the explanation."""


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
    # These proofs hold for every plan and are cheap, so they come first.
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


# ── missing bytes of the best plan ───────────────────────────────────────────────────────────


def _lacking(problem: Problem, best: Attempt) -> Shortage:
    """Shortage of the plan that lacks least; its peaks are the memory with which it fits."""
    over = np.maximum(best.timeline.peak_bytes - problem.memory_bytes, 0)
    worst, names = int(np.argmax(over)), problem.cluster.device_names
    planner = best.plan.planner or "memory-split"
    if not over[worst]:
        return Shortage(names[worst], 0, f"{planner} fits", "")
    message = (
        f"{names[worst]} lacks {format_bytes(int(over[worst]))} of the "
        f"{format_bytes(int(best.timeline.peak_bytes[worst]))} it needs in the plan that lacks "
        f"least ({planner})"
    )
    parts = [
        f"{format_bytes(_rounded_up(int(over[device])))} more on {names[device]}"
        for device in np.flatnonzero(over)
    ]
    return Shortage(
        names[worst], int(over[worst]), message, f"it would fit with {' and '.join(parts)}"
    )


def _rounded_up(size_bytes: int) -> int:
    """Smallest size not below the given one that `format_bytes` shows without rounding."""
    unit = 1
    while size_bytes >= 1024 * unit:
        unit *= 1024
    if unit == 1:
        return size_bytes
    return math.ceil(math.ceil(size_bytes / unit * 10) / 10 * unit)
