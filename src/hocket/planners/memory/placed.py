"""The memory order of a placement: each device runs its ops so that it holds few bytes at once.

Devices that lack memory come first, the worst of them first; where none does, all are ordered. For
one device at a time the whole step is searched, counting only its own bytes: what arrives from
another device is held from the moment when it is made. What was decided for a device is a
precedence for the next, so the orders never wait for each other, and devices with free memory
keep the order in which they would run by themselves. Cost: one search (`order`) per device.
"""

from __future__ import annotations

import numpy as np

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.memory.order import bound_of, search
from hocket.planners.memory.storages import device_storages, legal, preceded
from hocket.planners.order.levels import placement_of
from hocket.simulate.engine import instructions_of
from hocket.simulate.evaluate import Evaluator


def order_for_memory(problem: Problem, plan: Plan) -> Plan:
    """The plan with a strict order per device, or as it is where that would need more memory.

    Where all ops are on one device, it claims how few bytes are possible there.
    """
    device_of = placement_of(plan)
    tables = instructions_of(problem, plan)
    evaluator = Evaluator(problem)
    plain = _need(evaluator, plan)
    lacking = evaluator.peak_bytes - problem.memory_bytes
    by_start = np.lexsort((np.arange(len(device_of)), evaluator.op_start_s))
    used = np.unique(device_of).tolist()
    tight = [device for device in used if lacking[device] > 0] or used
    fixed = none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    claims: dict[str, tuple[int, ...]] = {}
    storages = None
    for device in sorted(tight, key=lambda device: -lacking[device]):
        storages = preceded(device_storages(problem.graph, tables, device), *fixed)
        found, bound_bytes = search(storages)
        if fixed is none and len(used) == 1:
            bound = bound_of(storages, found.peak_bytes, bound_bytes).bound_bytes
            bounds = [bound if each == device else 0 for each in range(len(lacking))]
            claims["peak_bound_bytes"] = tuple(bounds)
        own = found.order[device_of[found.order] == device]
        fixed = np.append(fixed[0], own[:-1]), np.append(fixed[1], own[1:])
    if storages is None:
        return plan
    order = legal(preceded(storages, *fixed), by_start).astype(np.int32)
    devices = range(problem.cluster.num_devices)
    made = plan.ordered(by_device=tuple(order[device_of[order] == device] for device in devices))
    made = made.claiming(order="memory", **claims)
    return made if _need(evaluator, made) <= plain else plan


def _need(evaluator: Evaluator, plan: Plan) -> tuple[float, int]:
    """Bytes that do not fit, and the bytes of the fullest device."""
    score = evaluator.plan(plan)
    return score.overflow_bytes, int(evaluator.peak_bytes.max(initial=0))
