"""Putting ops into the ledger and taking them out, compiled. O(spans · log instants) per op."""

from __future__ import annotations

from hocket.base.arrays import LongArray
from hocket.kernels import kernel
from hocket.kernels.heaps import mark
from hocket.planners.placement.memory.ledger import LedgerTable, MemoryLedger
from hocket.planners.shared import OpGroups
from hocket.planners.tables import TaskTable

# ── the tree of a device ─────────────────────────────────────────────────────────────────────────


@kernel
def _hold(ledger: MemoryLedger, device: int, first: int, last: int, num_bytes: int) -> None:
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


@kernel
def _lift(top: LongArray, pending: LongArray, node: int) -> None:
    """Set the nodes above a leaf after a change below them."""
    node >>= 1
    while node > 0:
        top[node] = max(top[2 * node], top[2 * node + 1]) + pending[node]
        node >>= 1


@kernel
def held_at(ledger: MemoryLedger, device: int, instant: int) -> int:
    """Bytes that the device holds at an instant."""
    top, pending = ledger.top[device], ledger.pending[device]
    node = instant + (len(top) >> 1)
    held: int = top[node]
    node >>= 1
    while node > 0:
        held += pending[node]
        node >>= 1
    return held


@kernel
def peak_instant(ledger: MemoryLedger, device: int) -> int:
    """The first instant at which the device holds the most."""
    top = ledger.top[device]
    size = len(top) >> 1
    node = 1
    while node < size:
        node *= 2
        if top[node + 1] > top[node]:
            node += 1
    return node - size


@kernel
def last_instant(ledger: MemoryLedger) -> int:
    """The end of the axis."""
    num_nodes: int = ledger.top.shape[1]
    return (num_nodes >> 1) - 1


# ── where tensors live ───────────────────────────────────────────────────────────────────────────


@kernel
def is_made(tasks: TaskTable, ledger: MemoryLedger, tensor: int, device: int) -> bool:
    """True if the producer of a tensor is on a device."""
    producer = tasks.producer[tensor]
    made: bool = producer >= 0 and ledger.device_of[producer] == device
    return made


@kernel
def start(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, tensor: int, device: int
) -> int:
    """First instant of a tensor on a device: a copy comes when the producer has ended."""
    producer = tasks.producer[tensor]
    if producer < 0:
        return 0
    made_at: int = facts.first[producer]
    ended_at: int = facts.last[producer]
    if ledger.device_of[producer] == device:
        return made_at
    return min(ended_at + 1, last_instant(ledger))


@kernel
def _keep(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, tensor: int, device: int, until: int
) -> None:
    """Let a tensor stay on a device until an instant; a view keeps what it is a view of."""
    while ledger.end[tensor, device] < until:
        held_until = ledger.end[tensor, device]
        ledger.end[tensor, device] = until
        if facts.alias_of[tensor] >= 0 and is_made(tasks, ledger, tensor, device):
            tensor = facts.alias_of[tensor]
            continue
        first = held_until + 1
        if held_until < 0:
            first = start(tasks, facts, ledger, tensor, device)
        _hold(ledger, device, first, until, facts.num_bytes[tensor])
        return


@kernel
def _needed_until(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, tensor: int, op: int, device: int
) -> int:
    """Last instant at which a device holds a tensor because an op there reads it."""
    owner = facts.owner_op[tensor]
    until: int = facts.last[op]
    if tasks.is_everywhere[tensor] or (owner >= 0 and ledger.device_of[owner] == device):
        until = last_instant(ledger)
    return until


@kernel
def made_until(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, tensor: int, op: int
) -> int:
    """Last instant at which the device of the producer holds a tensor, readers aside."""
    until: int = max(facts.last[op], facts.sent[tensor])
    if tasks.is_held[tensor]:
        until = last_instant(ledger)
    return until


@kernel
def place_op(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, op: int, device: int
) -> None:
    """Put an op that is nowhere on a device."""
    ledger.device_of[op] = device
    first, last = facts.first[op], facts.last[op]
    _hold(ledger, device, first, last, tasks.workspace_bytes[op])
    for index in range(tasks.read_ptr[op], tasks.read_ptr[op + 1]):
        tensor = facts.uses[index]
        until = _needed_until(tasks, facts, ledger, tensor, op, device)
        _keep(tasks, facts, ledger, tensor, device, until)
    for tensor in range(tasks.made_ptr[op], tasks.made_ptr[op + 1]):
        until = made_until(tasks, facts, ledger, tensor, op)
        copied_until = ledger.end[tensor, device]
        if copied_until >= 0:
            # Readers were placed before their producer: their copy becomes the original here.
            arrival = min(last + 1, last_instant(ledger))
            _hold(ledger, device, arrival, copied_until, -facts.num_bytes[tensor])
            ledger.end[tensor, device] = -1
            until = max(until, copied_until)
        _keep(tasks, facts, ledger, tensor, device, until)


@kernel
def place_unit(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: MemoryLedger,
    units: OpGroups,
    unit: int,
    device: int,
) -> None:
    """Put a unit that is nowhere on a device."""
    for index in range(units.ptr[unit], units.ptr[unit + 1]):
        place_op(tasks, facts, ledger, units.ops[index], device)


@kernel
def _forget_family(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, root: int, device: int
) -> None:
    """Release all that a device holds of a family."""
    for index in range(facts.family_ptr[root], facts.family_ptr[root + 1]):
        tensor = facts.family[index]
        until = ledger.end[tensor, device]
        if until < 0:
            continue
        if facts.alias_of[tensor] < 0 or not is_made(tasks, ledger, tensor, device):
            first = start(tasks, facts, ledger, tensor, device)
            _hold(ledger, device, first, until, -facts.num_bytes[tensor])
        ledger.end[tensor, device] = -1


@kernel
def _keep_family(
    tasks: TaskTable, facts: LedgerTable, ledger: MemoryLedger, root: int, device: int
) -> None:
    """Hold again what the ops on a device need of a family."""
    for index in range(facts.family_ptr[root], facts.family_ptr[root + 1]):
        tensor = facts.family[index]
        producer = tasks.producer[tensor]
        read_as, until = tensor if producer >= 0 else root, -1
        if is_made(tasks, ledger, tensor, device):
            until = made_until(tasks, facts, ledger, tensor, producer)
        for at in range(tasks.user_ptr[tensor], tasks.user_ptr[tensor + 1]):
            op = tasks.users[at]
            if ledger.device_of[op] == device:
                until = max(until, _needed_until(tasks, facts, ledger, read_as, op, device))
        _keep(tasks, facts, ledger, read_as, device, until)


@kernel
def take_unit(
    tasks: TaskTable,
    facts: LedgerTable,
    ledger: MemoryLedger,
    units: OpGroups,
    unit: int,
    device: int,
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


@kernel
def overflow(ledger: MemoryLedger, limit_bytes: LongArray) -> int:
    """Bytes above the limits, summed over devices."""
    total = 0
    for device in range(len(limit_bytes)):
        total += max(0, ledger.top[device, 1] - limit_bytes[device])
    return total
