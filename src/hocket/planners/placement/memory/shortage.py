"""Why nothing fits, and the smallest change found that would make it fit.

The plan that lacks the fewest bytes says which device lacks how much. What would help is tried, not
guessed: more memory on the one device that lacks most, halved while a plan is still found that
fits, and one more device of the kind that there is most of. A few repairs of the plan in all;
large graphs keep to the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hocket.cost.roofline import costs_from_settings
from hocket.hardware.cluster import Cluster, Link
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.memory.attempt import Attempt, attempt
from hocket.planners.placement.memory.fit import fit_memory, memory_split
from hocket.units import format_bytes

_TRIES = 4
"""How often the extra memory is halved."""
_MAX_OPS = 20_000
"""Above this many ops mending again and again would take minutes."""
_ROUND_BYTES = 2**20


@dataclass(frozen=True)
class Shortage:
    """What is missing for a plan to fit."""

    device: str
    """The device that lacks most, in the plan that lacks least."""
    lacking_bytes: int
    message: str
    smallest_change: str
    """A change after which a plan was found that fits; empty where none was found."""


def explain_shortage(problem: Problem, plans: Sequence[Plan]) -> Shortage:
    """What is missing, told of the best of ``plans`` and of what can be made of it."""
    tried = [attempt(problem, plan) for plan in (*plans, memory_split(problem, _base(plans)))]
    best = min(tried, key=Attempt.rank)
    over = np.maximum(best.timeline.peak_bytes - problem.memory_bytes, 0)
    worst = int(np.argmax(over))
    name = problem.cluster.device_names[worst]
    peak = format_bytes(int(best.timeline.peak_bytes[worst]))
    message = (
        f"{name} lacks {format_bytes(int(over[worst]))} of the {peak} it needs in the plan that "
        f"lacks least ({best.plan.planner or 'memory-split'})"
    )
    changes = [_enlarged(problem, best, over)]
    if problem.graph.num_ops <= _MAX_OPS:
        changes.append(_one_more(problem, best.plan))
    change = " or ".join(part for part in changes if part)
    return Shortage(name, int(over[worst]), message, f"it would fit {change}" if change else "")


def _base(plans: Sequence[Plan]) -> Plan:
    return replace(plans[0], order=None, priority=None) if plans else Plan()


def _enlarged(problem: Problem, best: Attempt, over: np.ndarray) -> str:
    """More memory where it lacks: all of it as the plan says, or less on the worst device alone."""
    worst = int(np.argmax(over))
    names = problem.cluster.device_names
    if problem.graph.num_ops <= _MAX_OPS:
        enough, too_little = _smallest_extra(problem, best.plan, worst, int(over.sum())), 0
        if enough > too_little:
            return f"with {format_bytes(enough)} more on {names[worst]}"
    parts = [f"{format_bytes(int(over[d]))} more on {names[d]}" for d in np.flatnonzero(over)]
    return f"with {' and '.join(parts)}"


def _smallest_extra(problem: Problem, plan: Plan, device: int, most: int) -> int:
    """Extra bytes on one device with which a plan that fits was found; 0 where none was."""
    if not _fits(_with_memory(problem, device, most), plan):
        return 0
    low, high = 0, most
    for _ in range(_TRIES):
        middle = -(-(low + high) // 2 // _ROUND_BYTES) * _ROUND_BYTES
        if not low < middle < high:
            break
        if _fits(_with_memory(problem, device, middle), plan):
            high = middle
        else:
            low = middle
    return high


def _one_more(problem: Problem, plan: Plan) -> str:
    """One more device like the first of the most frequent kind, if the step then fits."""
    kinds = [device.kind.name for device in problem.cluster.devices if not device.kind.is_cpu]
    if not kinds:
        return ""
    kind = max(kinds, key=kinds.count)
    cluster = _with_twin(problem.cluster, kind)
    costs = costs_from_settings(problem.graph, cluster, problem.costs.settings)
    larger = replace(problem, cluster=cluster, costs=costs)
    plan = replace(plan, cluster_hash="", order=None)
    return f"with one more {kind}" if _fits(larger, plan) else ""


def _fits(problem: Problem, plan: Plan) -> bool:
    return attempt(problem, fit_memory(problem, plan)).overflow_bytes == 0


def _with_memory(problem: Problem, device: int, extra_bytes: int) -> Problem:
    devices = list(problem.cluster.devices)
    devices[device] = replace(
        devices[device], memory_bytes=devices[device].memory_bytes + extra_bytes
    )
    return replace(problem, cluster=replace(problem.cluster, devices=tuple(devices)))


def _with_twin(cluster: Cluster, kind: str) -> Cluster:
    """The cluster with a copy of the first device of a kind, joined as that one is."""
    model = next(device for device in cluster.devices if device.kind.name == kind)
    twin = replace(model, name=f"another {model.name}")
    links: list[Link] = []
    for link in cluster.links:
        if model.name not in link.ends:
            links.append(link)
        elif link.is_bus:
            links.append(replace(link, ends=(*link.ends, twin.name)))
        else:
            ends = tuple(twin.name if end == model.name else end for end in link.ends)
            links += [link, replace(link, name=f"another {link.name}", ends=ends)]
    return replace(cluster, devices=(*cluster.devices, twin), links=tuple(links))
