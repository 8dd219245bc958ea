"""Placing and moving ops in the ledger, compiled. O(spans · log instants) per op."""

from __future__ import annotations

import numpy as np

from hocket.arrays import ByteArray, FloatArray
from hocket.compiled.heaps import mark
from hocket.compiled.jit import compiled, compiled_entry
from hocket.planners.placement.memory.ledger import Ledger, LedgerTable, Units
from hocket.planners.tables import TaskTable

# ── the tree of a device ─────────────────────────────────────────────────────────────────────────


@compiled
def _hold(ledger: Ledger, device: int, first: int, last: int, num_bytes: int) -> None:
    """Add bytes from one instant to another, both included."""
    if num_bytes == 0 or last < first:
        return
    top, pending = ledger.top[device], ledger.pending[device]
    size = len(top) >> 1
    left, right = first + size, last + size + 1
    while left < right:
        if left & 1:
            top[left] += num_bytes
            pending[left] += num_bytes
            left += 1
        if right & 1:
            right -= 1
            top[right] += num_bytes
            pending[right] += num_bytes
        left >>= 1
        right >>= 1
    _lift(top, pending, first + size)
    _lift(top, pending, last + size)


@compiled
def _lift(top: ByteArray, pending: ByteArray, node: int) -> None:
    """Set the nodes above a leaf after a change below them."""
    node >>= 1
    while node > 0:
        top[node] = max(top[2 * node], top[2 * node + 1]) + pending[node]
        node >>= 1


@compiled
def _held_at(ledger: Ledger, device: int, instant: int) -> int:
    """Bytes that the device holds at an instant."""
    top, pending = ledger.top[device], ledger.pending[device]
    node = instant + (len(top) >> 1)
    held: int = top[node]
    node >>= 1
    while node > 0:
        held += pending[node]
        node >>= 1
    return held


@compiled
def _peak_instant(ledger: Ledger, device: int) -> int:
    """The first instant at which the device holds the most."""
    top = ledger.top[device]
    size = len(top) >> 1
    node = 1
    while node < size:
        node *= 2
        if top[node + 1] > top[node]:
            node += 1
    return node - size


# ── where tensors live ───────────────────────────────────────────────────────────────────────────


@compiled
def _is_made(tasks: TaskTable, ledger: Ledger, tensor: int, device: int) -> bool:
    producer = tasks.producer[tensor]
    made: bool = producer >= 0 and ledger.device_of[producer] == device
    return made


@compiled
def _start(tasks: TaskTable, facts: LedgerTable, ledger: Ledger, tensor: int, device: int) -> int:
    """First instant of a tensor on a device: a copy comes when the producer has ended."""
    producer = tasks.producer[tensor]
    if producer < 0:
        return 0
    if ledger.device_of[producer] == device:
        return facts.first[producer]  # type: ignore[no-any-return]
    return min(facts.last[producer] + 1, (ledger.top.shape[1] >> 1) - 1)


@compiled
def _keep(
    tasks: TaskTable, facts: LedgerTable, ledger: Ledger, tensor: int, device: int, until: int
) -> None:
    """Let a tensor stay on a device until an instant; a view keeps what it is a view of."""
    while ledger.end[tensor, device] < until:
        held_until = ledger.end[tensor, device]
        ledger.end[tensor, device] = until
        if facts.alias_of[tensor] >= 0 and _is_made(tasks, ledger, tensor, device):
            tensor = facts.alias_of[tensor]
            continue
        first = held_until + 1
        if held_until < 0:
            first = _start(tasks, facts, ledger, tensor, device)
        _hold(ledger, device, first, until, facts.num_bytes[tensor])
        return


@compiled
def _needed_until(
    tasks: TaskTable, facts: LedgerTable, ledger: Ledger, tensor: int, op: int, device: int
) -> int:
    """Last instant at which a device holds a tensor because an op there reads it."""
    home = facts.home_op[tensor]
    if tasks.is_everywhere[tensor] or (home >= 0 and ledger.device_of[home] == device):
        return (ledger.top.shape[1] >> 1) - 1
    return facts.last[op]  # type: ignore[no-any-return]


@compiled
def _made_until(
    tasks: TaskTable, facts: LedgerTable, ledger: Ledger, tensor: int, op: int
) -> int:
    if tasks.is_held[tensor]:
        return (ledger.top.shape[1] >> 1) - 1
    return max(facts.last[op], facts.sent[tensor])


@compiled
def _place_op(
    tasks: TaskTable, facts: LedgerTable, ledger: Ledger, op: int, device: int
) -> None:
    """Put an op that is nowhere on a device."""
    ledger.device_of[op] = device
    first, last = facts.first[op], facts.last[op]
    _hold(ledger, device, first, last, tasks.workspace_bytes[op])
    for index in range(tasks.read_ptr[op], tasks.read_ptr[op + 1]):
        tensor = facts.uses[index]
        until = _needed_until(tasks, facts, ledger, tensor, op, device)
        _keep(tasks, facts, ledger, tensor, device, until)
    last_instant = (ledger.top.shape[1] >> 1) - 1
    for tensor in range(tasks.made_ptr[op], tasks.made_ptr[op + 1]):
        until = _made_until(tasks, facts, ledger, tensor, op)
        copied_until = ledger.end[tensor, device]
        if copied_until >= 0:
            # Readers came before their producer: what they held as a copy is at home here now.
            arrival = min(last + 1, last_instant)
            _hold(ledger, device, arrival, copied_until, -facts.num_bytes[tensor])
            ledger.end[tensor, device] = -1
            until = max(until, copied_until)
        _keep(tasks, facts, ledger, tensor, device, until)


@compiled
def place_unit(
    tasks: TaskTable, facts: LedgerTable, ledger: Ledger, units: Units, unit: int, device: int
) -> None:
    for index in range(units.ptr[unit], units.ptr[unit + 1]):
        _place_op(tasks, facts, ledger, units.ops[index], device)


@compiled
def _forget_family(
    tasks: TaskTable, facts: LedgerTable, ledger: Ledger, root: int, device: int
) -> None:
    """Release all that a device holds of a family."""
    for index in range(facts.family_ptr[root], facts.family_ptr[root + 1]):
        tensor = facts.family[index]
        until = ledger.end[tensor, device]
        if until < 0:
            continue
        if facts.alias_of[tensor] < 0 or not _is_made(tasks, ledger, tensor, device):
            first = _start(tasks, facts, ledger, tensor, device)
            _hold(ledger, device, first, until, -facts.num_bytes[tensor])
        ledger.end[tensor, device] = -1


@compiled
def _keep_family(
    tasks: TaskTable, facts: LedgerTable, ledger: Ledger, root: int, device: int
) -> None:
    """Hold again what the ops on a device need of a family."""
    for index in range(facts.family_ptr[root], facts.family_ptr[root + 1]):
        tensor = facts.family[index]
        producer = tasks.producer[tensor]
        read_as, until = tensor if producer >= 0 else root, -1
        if _is_made(tasks, ledger, tensor, device):
            until = _made_until(tasks, facts, ledger, tensor, producer)
        for at in range(tasks.user_ptr[tensor], tasks.user_ptr[tensor + 1]):
            op = tasks.users[at]
            if ledger.device_of[op] == device:
                until = max(until, _needed_until(tasks, facts, ledger, read_as, op, device))
        _keep(tasks, facts, ledger, read_as, device, until)


@compiled
def take_unit(
    tasks: TaskTable, facts: LedgerTable, ledger: Ledger, units: Units, unit: int, device: int
) -> None:
    """Take a unit off its device."""
    touched = ledger.touched
    for index in range(units.ptr[unit], units.ptr[unit + 1]):
        op = units.ops[index]
        _hold(ledger, device, facts.first[op], facts.last[op], -tasks.workspace_bytes[op])
        for at in range(tasks.read_ptr[op], tasks.read_ptr[op + 1]):
            mark(touched, facts.root[facts.uses[at]])
        for tensor in range(tasks.made_ptr[op], tasks.made_ptr[op + 1]):
            mark(touched, facts.root[tensor])
    for index in range(touched.size[0]):
        _forget_family(tasks, facts, ledger, touched.item[index], device)
    for index in range(units.ptr[unit], units.ptr[unit + 1]):
        ledger.device_of[units.ops[index]] = -1
    for index in range(touched.size[0]):
        _keep_family(tasks, facts, ledger, touched.item[index], device)
        touched.has[touched.item[index]] = False
    touched.size[0] = 0


# ── what planners call ───────────────────────────────────────────────────────────────────────────

_MODULES = ("hocket.planners.placement.memory.ledger", "hocket.planners.tables")


@compiled_entry(*_MODULES)
def place_all(
    tasks: TaskTable, facts: LedgerTable, ledger: Ledger, device_of: ByteArray
) -> None:
    """Put every op on its device."""
    for op in range(len(device_of)):
        _place_op(tasks, facts, ledger, op, device_of[op])


@compiled_entry(*_MODULES)
def fill(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: Ledger,
    units: Units,
    fixed: ByteArray,
    sequence: ByteArray,
    devices: ByteArray,
    cap_bytes: ByteArray,
    cap_s: float,
    unit_s: FloatArray,
) -> bool:
    """Give units, in sequence, to one device after another, each until it is full.

    A device is full when a further unit would bring it above its bytes or its seconds
    (``unit_s[device, unit]``). Units that the device cannot run go to the first that can, those
    that are fixed to their device. Returns whether all found room.
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


@compiled
def overflow(ledger: Ledger, limit_bytes: ByteArray) -> int:
    total = 0
    for device in range(len(limit_bytes)):
        total += max(0, ledger.top[device, 1] - limit_bytes[device])
    return total


@compiled_entry(*_MODULES)
def credit(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: Ledger,
    units: Units,
    device: int,
    bytes_of_unit: FloatArray,
) -> int:
    """Share out the bytes at a device's peak among the units that keep them there.

    Bytes that several units keep are shared equally: only together can they release them. Returns
    the instant of the peak.
    """
    instant = _peak_instant(ledger, device)
    for op in range(len(units.of)):
        if ledger.device_of[op] == device and facts.first[op] <= instant <= facts.last[op]:
            bytes_of_unit[units.of[op]] += tasks.workspace_bytes[op]
    for root in range(len(facts.root)):
        if facts.root[root] == root:
            _credit_family(tasks, facts, ledger, units, root, device, instant, bytes_of_unit)
    return instant


@compiled
def _credit_family(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: Ledger,
    units: Units,
    root: int,
    device: int,
    instant: int,
    bytes_of_unit: FloatArray,
) -> None:
    held, num_keepers = 0, 0
    # Twice over the same keepers: first to count them, then to give each its share.
    for is_giving in range(2):
        if is_giving and (held == 0 or num_keepers == 0):
            return
        last_keeper = -1
        for index in range(facts.family_ptr[root], facts.family_ptr[root + 1]):
            tensor = facts.family[index]
            if ledger.end[tensor, device] < instant:
                continue
            is_made = _is_made(tasks, ledger, tensor, device)
            if not is_giving and (facts.alias_of[tensor] < 0 or not is_made):
                if _start(tasks, facts, ledger, tensor, device) <= instant:
                    held += facts.num_bytes[tensor]
            producer = tasks.producer[tensor]
            if is_made and _made_until(tasks, facts, ledger, tensor, producer) >= instant:
                keeper = units.of[producer]
                if keeper != last_keeper:
                    last_keeper = keeper
                    num_keepers += 1 - is_giving
                    if is_giving:
                        bytes_of_unit[keeper] += held / num_keepers
            for at in range(tasks.user_ptr[tensor], tasks.user_ptr[tensor + 1]):
                op = tasks.users[at]
                if ledger.device_of[op] != device:
                    continue
                if not tasks.is_everywhere[tensor] and facts.last[op] < instant:
                    # Of those that have run, only the one at home keeps the tensor.
                    if facts.home_op[tensor] != op:
                        continue
                keeper = units.of[op]
                if keeper != last_keeper:
                    last_keeper = keeper
                    num_keepers += 1 - is_giving
                    if is_giving:
                        bytes_of_unit[keeper] += held / num_keepers


@compiled_entry(*_MODULES)
def move_units(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: Ledger,
    units: Units,
    candidates: ByteArray,
    targets: ByteArray,
    limit_bytes: ByteArray,
    work: ByteArray,
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
        if _held_at(ledger, source, instant) <= limit_bytes[source] or wasted > max_wasted:
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
