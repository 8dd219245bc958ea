"""Planner operations on the ledger, compiled: fill devices, attribute peaks, move units."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel
from hocket.planners.placement.memory.kernel import (
    held_at,
    is_made,
    made_until,
    overflow,
    peak_instant,
    place_op,
    place_unit,
    start,
    take_unit,
)
from hocket.planners.placement.memory.ledger import LedgerTable, MemoryLedger
from hocket.planners.shared import OpGroups
from hocket.planners.tables import TaskTable


@kernel
def place_all(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, device_of: LongArray
) -> None:
    """Put every op on its device."""
    for op in range(len(device_of)):
        place_op(tasks, facts, ledger, op, device_of[op])


@kernel
def fill(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: MemoryLedger,
    units: OpGroups,
    fixed: LongArray,
    sequence: LongArray,
    devices: LongArray,
    cap_bytes: LongArray,
    cap_s: float,
    unit_s: FloatArray,
) -> bool:
    """Give units, in sequence, to one device after another, each until it is full.

    A device is full when a further unit would bring it above its bytes or its seconds
    (``unit_s[device, unit]``). Units that the device cannot run go to the first that can, those
    that are fixed to their device. Returns True if all units fit.
    """
    for unit in range(len(fixed)):
        if fixed[unit] >= 0:
            place_unit(tasks, facts, ledger, units, unit, fixed[unit])
    turn, used_s = 0, 0.0
    for index in range(len(sequence)):
        unit = sequence[index]
        able = turn
        while np.isinf(unit_s[devices[able], unit]):
            able = (able + 1) % len(devices)
        if able != turn:
            place_unit(tasks, facts, ledger, units, unit, devices[able])
            continue
        while turn < len(devices):
            device = devices[turn]
            after_s = used_s + unit_s[device, unit]
            if after_s <= cap_s:
                place_unit(tasks, facts, ledger, units, unit, device)
                if ledger.top[device, 1] <= cap_bytes[device]:
                    used_s = after_s
                    break
                take_unit(tasks, facts, ledger, units, unit, device)
            turn, used_s = turn + 1, 0.0
        if turn == len(devices):
            return False
    return overflow(ledger, cap_bytes) == 0


@kernel
def credit(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: MemoryLedger,
    units: OpGroups,
    device: int,
    bytes_of_unit: FloatArray,
) -> int:
    """Attribute the bytes at a device's peak to the units that keep them there.

    Bytes that several units keep are shared equally: only together can they release them. Returns
    the instant of the peak.
    """
    instant = peak_instant(ledger, device)
    for op in range(len(units.of)):
        if ledger.device_of[op] == device and facts.first[op] <= instant <= facts.last[op]:
            bytes_of_unit[units.of[op]] += tasks.workspace_bytes[op]
    for root in range(len(facts.root)):
        if facts.root[root] == root:
            _credit_family(tasks, facts, ledger, units, root, device, instant, bytes_of_unit)
    return instant


@kernel
def _credit_family(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: MemoryLedger,
    units: OpGroups,
    root: int,
    device: int,
    instant: int,
    bytes_of_unit: FloatArray,
) -> None:
    held = 0
    for index in range(facts.family_ptr[root], facts.family_ptr[root + 1]):
        tensor = facts.family[index]
        is_alias = facts.alias_of[tensor] >= 0 and is_made(tasks, ledger, tensor, device)
        if ledger.end[tensor, device] < instant or is_alias:
            continue
        if start(tasks, facts, ledger, tensor, device) <= instant:
            held += facts.num_bytes[tensor]
    if held == 0:
        return
    num_holders = _credit_holders(
        tasks, facts, ledger, units, root, device, instant, bytes_of_unit, 0.0
    )
    if num_holders > 0:
        share = held / num_holders
        _credit_holders(tasks, facts, ledger, units, root, device, instant, bytes_of_unit, share)


@kernel
def _credit_holders(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: MemoryLedger,
    units: OpGroups,
    root: int,
    device: int,
    instant: int,
    bytes_of_unit: FloatArray,
    share: float,
) -> int:
    """Credit a share to each unit that keeps tensors of a family; returns the number of units.

    Only consecutive duplicates are merged: a unit counts again after another one.
    """
    holder, num_holders = -1, 0
    for index in range(facts.family_ptr[root], facts.family_ptr[root + 1]):
        tensor = facts.family[index]
        if ledger.end[tensor, device] < instant:
            continue
        producer = tasks.producer[tensor]
        if (
            is_made(tasks, ledger, tensor, device)
            and made_until(tasks, facts, ledger, tensor, producer) >= instant
            and units.of[producer] != holder
        ):
            holder = units.of[producer]
            num_holders += 1
            bytes_of_unit[holder] += share
        for at in range(tasks.user_ptr[tensor], tasks.user_ptr[tensor + 1]):
            op = tasks.users[at]
            # Of the ops that have ended, only the owner op keeps the tensor.
            keeps = (
                tasks.is_everywhere[tensor]
                or facts.last[op] >= instant
                or facts.owner_op[tensor] == op
            )
            if ledger.device_of[op] == device and keeps and units.of[op] != holder:
                holder = units.of[op]
                num_holders += 1
                bytes_of_unit[holder] += share
    return num_holders


@kernel
def move_units(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: MemoryLedger,
    units: OpGroups,
    candidates: LongArray,
    targets: LongArray,
    limit_bytes: LongArray,
    work: LongArray,
    max_wasted: int,
    source: int,
    instant: int,
    may_overflow: bool,
) -> int:
    """Move candidates off a device until it is within its limit at an instant; how many moved.

    Each goes to the first of its targets (``targets[candidate, choice]``) that stays within its
    own limit; with ``may_overflow`` also to one that does not if the overflow of all devices
    together shrinks. Ends early when tries in vain add up to ``max_wasted`` of ``work``.
    """
    num_moved, wasted = 0, 0
    for index in range(len(candidates)):
        if held_at(ledger, source, instant) <= limit_bytes[source] or wasted > max_wasted:
            break
        if targets[index, 0] < 0:
            continue
        unit = candidates[index]
        before = overflow(ledger, limit_bytes)
        take_unit(tasks, facts, ledger, units, unit, source)
        is_placed = False
        for choice in range(targets.shape[1]):
            target = targets[index, choice]
            if target < 0:
                break
            place_unit(tasks, facts, ledger, units, unit, target)
            after = overflow(ledger, limit_bytes)
            fits = ledger.top[target, 1] <= limit_bytes[target] and after <= before
            if fits or (may_overflow and after < before):
                is_placed = True
                break
            take_unit(tasks, facts, ledger, units, unit, target)
            wasted += work[unit]
        if is_placed:
            num_moved += 1
        else:
            place_unit(tasks, facts, ledger, units, unit, source)
    return num_moved
