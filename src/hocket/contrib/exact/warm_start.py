"""Plans to start the exact search from: each device alone, and a list schedule.

The list schedule takes ops in the order of their longest way to the end and puts each, with its
whole unit, where it would end first (HEFT; Topcuoglu et al. 2002), once for each way of counting
transfers: in full, or not at all. Held bytes are kept within memory. O(ops · devices · reads).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.contrib.exact.instance import Instance, Read
from hocket.plan.plan import Plan


def first_plans(instance: Instance, plan: Plan, tail_s: FloatArray) -> Iterator[Plan]:
    """Candidate plans; none of them need fit."""
    able = np.all(instance.op_ticks >= 0, axis=1)
    num_ops = instance.op_ticks.shape[1]
    for device in np.flatnonzero(able):
        alone = np.full(num_ops, device, dtype=np.int32)
        yield plan.placing(alone, priority=-tail_s)
    for transfer_weight in (1.0, 0.0):
        device_of = _list_schedule(instance, tail_s, transfer_weight)
        if device_of is not None:
            yield plan.placing(device_of, priority=-tail_s)


def _list_schedule(
    instance: Instance, tail_s: FloatArray, transfer_weight: float
) -> IntArray | None:
    """The device of each op; None where the bytes of some unit fit nowhere any more."""
    op_s, units = instance.tasks.op_s, instance.units
    reads: list[list[Read]] = [[] for _ in tail_s]
    for read in instance.reads:
        reads[read.reader].append(read)
    free_s = np.zeros(len(op_s))
    free_bytes = instance.problem.memory_bytes.copy()
    free_bytes[0] -= units.unread_bytes
    end_s = np.zeros(len(tail_s))
    device_of_unit = np.full(units.count, -1, dtype=np.int32)
    for op in sorted(range(len(tail_s)), key=lambda op: (-tail_s[op], op)):
        unit = units.of_op[op]
        ready_s = _ready_s(instance, reads[op], end_s, device_of_unit, transfer_weight)
        finish_s = np.maximum(free_s, ready_s) + op_s[:, op]
        usable = (instance.op_ticks[:, op] >= 0) & (free_bytes >= units.held_bytes[unit])
        device = int(device_of_unit[unit])
        if device < 0:
            if not usable.any():
                return None
            device = int(np.where(usable, finish_s, np.inf).argmin())
            device_of_unit[unit] = device
            free_bytes[device] -= units.held_bytes[unit]
        free_s[device] = end_s[op] = finish_s[device]
    return device_of_unit[units.of_op]


def _ready_s(
    instance: Instance,
    reads: list[Read],
    end_s: FloatArray,
    device_of_unit: IntArray,
    transfer_weight: float,
) -> FloatArray:
    """Per device: when all that an op reads would be there."""
    tasks = instance.tasks
    ready_s = np.zeros(len(tasks.op_s))
    for read in reads:
        home = device_of_unit[instance.units.of_op[read.home]]
        made_s = end_s[read.source] if read.source >= 0 else 0.0
        if home < 0:
            continue
        transfer_s = tasks.latency_s[home] + tasks.work[read.tensor] * tasks.unit_s[home]
        ready_s = np.maximum(ready_s, made_s + transfer_weight * transfer_s)
    return ready_s
