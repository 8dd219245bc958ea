"""Order the ops of each device of a placement so that it holds few bytes at once.

Devices that exceed their memory come first, the worst first; if none does, all are ordered. For
each device the whole step is searched, counting only the device's own bytes; a tensor from another
device counts from the moment when it is made. The order of one device becomes a precedence for the
next, so devices never deadlock, and devices with free memory keep their order. One search (`order`)
per device.
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
    """Return the plan with a strict op order per device; unchanged if that needs more memory.

    If all ops are on one device, the plan also claims the lower bound on the bytes there.
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
        # With several devices the bound of one ignores what the others force on it.
        if fixed is none and len(used) == 1:
            bound = bound_of(storages, found.peak_bytes, bound_bytes).bound_bytes
            bounds = [bound if each == device else 0 for each in range(len(lacking))]
            claims["peak_bound_bytes"] = tuple(bounds)
        # A chain of precedences fixes the device's order in the searches of later devices.
        own = found.order[device_of[found.order] == device]
        fixed = np.append(fixed[0], own[:-1]), np.append(fixed[1], own[1:])
    if storages is None:
        return plan
    # Devices without a search keep their order by start, as far as the precedences allow.
    order = legal(preceded(storages, *fixed), by_start).astype(np.int32)
    devices = range(problem.cluster.num_devices)
    made = plan.ordered(by_device=tuple(order[device_of[order] == device] for device in devices))
    made = made.claiming(order="memory", **claims)
    return made if _need(evaluator, made) <= plain else plan


def _need(evaluator: Evaluator, plan: Plan) -> tuple[float, int]:
    """Bytes that do not fit into memory, and the peak of the fullest device."""
    score = evaluator.plan(plan)
    return score.overflow_bytes, int(evaluator.peak_bytes.max(initial=0))
