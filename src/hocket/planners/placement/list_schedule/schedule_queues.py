"""Heaps with the position of each op, so that keys can be changed and ops removed.

Every device has four heaps (`LATER` and so on in `schedule_state`); ties go by rank. O(log n) per
change. The file also estimates when inputs could be on a device, from which the keys follow.
"""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel
from hocket.planners.placement.list_schedule.schedule_state import (
    ARRIVED,
    DUE,
    LATER,
    NUM_HEAPS,
    PARKED,
    Net,
    Queues,
)

# When data could be on a device, and sending it there. O(reads of an op · copies of a tensor).


@kernel
def copy_on(net: Net, tensor: int, device: int) -> int:
    """Number of the copy of a tensor on a device; -1 if there is none."""
    row = net.tensors[tensor]
    copy: int = row.last_copy
    if copy >= 0 and row.directory >= 0:
        copy = net.directory[row.directory, device]
        return copy
    while copy >= 0 and net.copies[copy].device != device:
        copy = net.copies[copy].older
    return copy


@kernel
def owner_device(net: Net, tensor: int) -> int:
    """Device on which a tensor is produced or stored first; -1 while unknown."""
    row = net.tensors[tensor]
    owner: int = row.owner if row.producer >= 0 else net.tensors[row.family].owner
    return owner


@kernel
def is_missing(net: Net, tensor: int, device: int) -> bool:
    """True if a tensor has an owner device, but neither it nor a copy is on the given device."""
    owner = owner_device(net, tensor)
    return owner >= 0 and owner != device and copy_on(net, tensor, device) < 0


@kernel
def _free_s(net: Net, ready_s: float, src: int, dst: int) -> float:
    """Earliest time at which a transfer could begin."""
    route = net.routes[src, dst]
    if route.send_queue < 0:
        return ready_s
    send_s: float = net.queue_free_s[route.send_queue]
    receive_s: float = net.queue_free_s[route.receive_queue]
    return max(ready_s, max(send_s, receive_s))


@kernel
def data_s(net: Net, op: int, device: int) -> float:
    """Earliest time at which all inputs of an op could be on a device.

    All predecessors of the op must be placed.
    """
    latest_s, sent_s, sender = 0.0, 0.0, -1
    row = net.ops[op]
    for index in range(row.read_start, row.read_stop):
        tensor = net.reads[index]
        src = owner_device(net, tensor)
        if src < 0 or net.tensors[tensor].is_everywhere:
            continue
        if src == device:
            latest_s = max(latest_s, net.tensors[tensor].made_s)
            continue
        copy = copy_on(net, tensor, device)
        if copy >= 0:
            latest_s = max(latest_s, net.copies[copy].arrival_s)
            continue
        route, producer = net.routes[src, device], net.tensors[tensor].producer
        transfer_s = route.latency_s + net.tensors[tensor].work * route.unit_s
        # Tensors of one producer are adjacent and follow each other through the queues.
        follows = producer == sender and producer >= 0 and route.send_queue >= 0
        sent_s = sent_s + transfer_s if follows else transfer_s
        sender = producer
        arrival_s = _free_s(net, net.tensors[tensor].made_s, src, device) + sent_s
        latest_s = max(latest_s, arrival_s)
    return latest_s


@kernel
def remote_s(net: Net, op: int) -> tuple[int, float]:
    """Return the input of an op that reaches further devices last, and the earliest time it could.

    The tensor is -1 if the op reads nothing that has to be sent.
    """
    latest, latest_s = -1, 0.0
    row = net.ops[op]
    for index in range(row.read_start, row.read_stop):
        tensor = net.reads[index]
        src = owner_device(net, tensor)
        if src < 0 or net.tensors[tensor].is_everywhere:
            continue
        route = net.routes[src, src]
        transfer_s = route.least_latency_s + net.tensors[tensor].work * route.least_unit_s
        # A lower bound: the receiver's queue is ignored and the fastest link is assumed.
        free_s = net.tensors[tensor].made_s
        if route.send_queue >= 0:
            free_s = max(free_s, net.queue_free_s[route.send_queue])
        if latest < 0 or free_s + transfer_s > latest_s:
            latest, latest_s = tensor, free_s + transfer_s
    return latest, latest_s


@kernel
def send(net: Net, copy: int, tensor: int, device: int) -> None:
    """Send a tensor to a device and record the copy under the given number."""
    arrival_s, src = 0.0, owner_device(net, tensor)
    if not net.tensors[tensor].is_everywhere:
        route = net.routes[src, device]
        transfer_s = route.latency_s + net.tensors[tensor].work * route.unit_s
        arrival_s = _free_s(net, net.tensors[tensor].made_s, src, device) + transfer_s
        if route.send_queue >= 0:
            net.queue_free_s[route.send_queue] = arrival_s
            net.queue_free_s[route.receive_queue] = arrival_s
    row = net.copies[copy]
    row.device = device
    row.arrival_s = arrival_s
    row.older = net.tensors[tensor].last_copy
    net.tensors[tensor].last_copy = copy
    if net.tensors[tensor].directory >= 0:
        net.directory[net.tensors[tensor].directory, device] = copy


@kernel
def _set(queues: Queues, base: int, place: int, device: int, key: float, op: int) -> None:
    entry = queues.entries[base + place // NUM_HEAPS]
    entry.key = key
    entry.op = op
    queues.where[op, device] = place


@kernel
def _rise(queues: Queues, base: int, place: int, device: int, key: float, op: int) -> None:
    """Insert an entry at a free position of a heap, or above it."""
    at, heap = place // NUM_HEAPS, place % NUM_HEAPS
    while at > 0:
        above = (at - 1) >> 1
        other = queues.entries[base + above]
        if other.key < key or (other.key == key and other.op < op):
            break
        _set(queues, base, at * NUM_HEAPS + heap, device, other.key, other.op)
        at = above
    _set(queues, base, at * NUM_HEAPS + heap, device, key, op)


@kernel
def _sink(
    queues: Queues, base: int, size: int, place: int, device: int, key: float, op: int
) -> None:
    """Insert an entry at a free position of a heap, or below it."""
    at, heap = place // NUM_HEAPS, place % NUM_HEAPS
    while 2 * at + 1 < size:
        below = 2 * at + 1
        other = queues.entries[base + below]
        if below + 1 < size:
            right = queues.entries[base + below + 1]
            if right.key < other.key or (right.key == other.key and right.op < other.op):
                below += 1
                other = right
        if key < other.key or (key == other.key and op < other.op):
            break
        _set(queues, base, at * NUM_HEAPS + heap, device, other.key, other.op)
        at = below
    _set(queues, base, at * NUM_HEAPS + heap, device, key, op)


@kernel
def _insert(queues: Queues, device: int, heap: int, key: float, op: int) -> None:
    number = device * NUM_HEAPS + heap
    place = queues.size[number] * NUM_HEAPS + heap
    queues.size[number] += 1
    _rise(queues, number * queues.where.shape[0], place, device, key, op)


@kernel
def remove(queues: Queues, device: int, op: int) -> None:
    """Remove an op from whichever of the device's heaps it is in."""
    place = queues.where[op, device] + 0
    if place < 0:
        return
    queues.where[op, device] = -1
    number = device * NUM_HEAPS + place % NUM_HEAPS
    queues.size[number] -= 1
    size = queues.size[number]
    # The removed entry was the last of the heap, so there is no gap to fill.
    if place // NUM_HEAPS == size:
        return
    base = number * queues.where.shape[0]
    old = queues.entries[base + place // NUM_HEAPS]
    last = queues.entries[base + size]
    if last.key < old.key or (last.key == old.key and last.op < op):
        _rise(queues, base, place, device, last.key, last.op)
    else:
        _sink(queues, base, size, place, device, last.key, last.op)


@kernel
def move(queues: Queues, device: int, heap: int, key: float, op: int) -> None:
    """Insert an op into one of the device's heaps, removing it from its previous one."""
    place, number = queues.where[op, device] + 0, device * NUM_HEAPS + heap
    if place < 0 or place % NUM_HEAPS != heap:
        remove(queues, device, op)
        _insert(queues, device, heap, key, op)
        return
    base = number * queues.where.shape[0]
    if key < queues.entries[base + place // NUM_HEAPS].key:
        _rise(queues, base, place, device, key, op)
    else:
        _sink(queues, base, queues.size[number], place, device, key, op)


@kernel
def num_in(queues: Queues, device: int, heap: int) -> int:
    """Number of ops in a heap."""
    count: int = queues.size[device * NUM_HEAPS + heap]
    return count


@kernel
def op_at(queues: Queues, device: int, heap: int, at: int) -> int:
    """Op at a position of a heap; position 0 has the smallest (key, rank)."""
    number = device * NUM_HEAPS + heap
    op: int = queues.entries[number * queues.where.shape[0] + at].op
    return op


@kernel
def top_key(queues: Queues, device: int, heap: int) -> float:
    """Smallest key of a heap; infinite if the heap is empty."""
    number = device * NUM_HEAPS + heap
    if queues.size[number] == 0:
        return np.inf
    key: float = queues.entries[number * queues.where.shape[0]].key
    return key


@kernel
def has_work(queues: Queues, device: int, now: float) -> bool:
    """True if the device may be able to offer an op by now."""
    number = device * NUM_HEAPS
    if queues.size[number + ARRIVED] + queues.size[number + DUE] + queues.size[number + PARKED] > 0:
        return True
    return top_key(queues, device, LATER) <= now
