"""The event loop of list scheduling: free devices offer ops, the best offer is committed, ops end.

The package's docstring states the rules and the complexity.
"""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel
from hocket.kernels.containers import ZERO
from hocket.kernels.heaps import pop, push
from hocket.planners.placement.list_schedule.schedule_queues import (
    copy_on,
    data_s,
    has_work,
    is_missing,
    move,
    num_in,
    op_at,
    owner_device,
    remote_s,
    remove,
    send,
    top_key,
)
from hocket.planners.placement.list_schedule.schedule_state import (
    ARRIVED,
    DUE,
    LATER,
    NUM_HEAPS,
    PARKED,
    PLACED,
    READY,
    ScheduleState,
)

# Bytes that an op would take on a device; taking and releasing them.


@kernel
def _needs(state: ScheduleState, op: int, device: int) -> tuple[int, int]:
    """Bytes that an op would add to a device, and how many of them exist before the step."""
    net, row = state.net, state.net.ops[op]
    need, early = row.taken_bytes + 0, row.taken_bytes * 0
    for index in range(row.read_start, row.read_stop):
        tensor = net.reads[index]
        if is_missing(net, tensor, device):
            need += net.tensors[tensor].num_bytes
            if net.tensors[tensor].is_everywhere:
                early += net.tensors[tensor].num_bytes
    group = state.groups[row.group]
    if group.bound < 0:
        need += group.reserve_bytes
        for index in range(group.family_start, group.family_stop):
            family = net.tensors[state.families[index]]
            if family.owner < 0:
                need += family.num_bytes
                early += family.num_bytes
    return need, early


@kernel
def lacking_bytes(state: ScheduleState, op: int, device: int) -> int:
    """Bytes that an op needs beyond a device's memory; 0 or less if it fits."""
    row = state.devices[device]
    # An upper limit first: most ops fit without looking up which inputs are missing.
    at_most: int = row.peak_bytes + state.net.ops[op].most_bytes - row.memory_bytes
    if at_most <= 0:
        return at_most
    need, early = _needs(state, op, device)
    lacking: int = max(row.used_bytes + need, row.peak_bytes + early) - row.memory_bytes
    return lacking


@kernel
def fits_at_bytes(state: ScheduleState, op: int, device: int) -> float:
    """Free bytes from which an op fits; infinite if no release can make it fit."""
    need, early = _needs(state, op, device)
    if state.devices[device].peak_bytes + early > state.devices[device].memory_bytes:
        return np.inf
    return float(need)


@kernel
def take(state: ScheduleState, op: int, device: int) -> None:
    """Allocate the bytes of an op, before its inputs are sent and its group is bound."""
    row = state.devices[device]
    need, early = _needs(state, op, device)
    row.used_bytes += need
    row.peak_bytes = max(row.peak_bytes + early, row.used_bytes)


@kernel
def add_copy(state: ScheduleState, tensor: int, copy: int, device: int) -> None:
    """Allocate the storage of a copy."""
    storage = state.storages[copy + len(state.net.tensors)]
    storage.device = device
    storage.num_bytes = state.net.tensors[tensor].num_bytes
    storage.num_living = 1
    storage.is_kept = state.net.tensors[tensor].is_everywhere


@kernel
def add_result(state: ScheduleState, tensor: int, device: int) -> None:
    """Assign the storage of a placed op's result: its own, or that of the tensor it aliases."""
    row = state.net.tensors[tensor]
    row.owner = device
    number = tensor
    if row.alias_of >= 0:
        copy = copy_on(state.net, row.alias_of, device)
        own = state.net.tensors[row.alias_of].storage
        number = copy + len(state.net.tensors) if copy >= 0 else own
    row.storage = number
    if number < 0:
        return
    storage = state.storages[number]
    storage.num_living += 1
    if row.is_held:
        storage.is_kept = 1
    if row.alias_of < 0:
        storage.device = device
        storage.num_bytes = row.num_bytes


@kernel
def _leave(state: ScheduleState, number: int) -> None:
    """Count one tensor of a storage as no longer needed; the last one frees the storage."""
    storage = state.storages[number]
    storage.num_living -= 1
    if storage.num_living == 0 and not storage.is_kept:
        state.devices[storage.device].used_bytes -= storage.num_bytes


@kernel
def release(state: ScheduleState, tensor: int) -> None:
    """Release a tensor whose readers have all ended, with its copies."""
    row = state.net.tensors[tensor]
    if row.storage >= 0:
        _leave(state, row.storage)
    copy = row.last_copy
    while copy >= 0:
        _leave(state, copy + len(state.net.tensors))
        copy = state.net.copies[copy].older


# The op that a free device would start now.


@kernel
def may_run(state: ScheduleState, op: int, device: int) -> bool:
    """True if an op may run on a device, ignoring memory."""
    bound: int = state.groups[state.net.ops[op].group].bound
    if bound >= 0:
        return bound == device
    seconds: float = state.kind_s[state.devices[device].kind, op]
    return seconds < np.inf


@kernel
def _earliest_s(state: ScheduleState, op: int, device: int) -> float:
    """Earliest start of an op on a device; infinite if it may not run or does not fit there."""
    if not may_run(state, op, device) or lacking_bytes(state, op, device) > 0:
        return np.inf
    avail_s: float = state.devices[device].avail_s
    return max(data_s(state.net, op, device), avail_s)


@kernel
def _fits_or_parks(state: ScheduleState, op: int, device: int) -> bool:
    """True if an op fits now; otherwise parks it until bytes are released."""
    if lacking_bytes(state, op, device) <= 0:
        return True
    move(state.queues, device, PARKED, fits_at_bytes(state, op, device), op)
    return False


@kernel
def _sort_by_now(state: ScheduleState, device: int, now: float) -> None:
    """Move ops that may fit again, and ops whose inputs may have arrived, to their current heap."""
    queues, row = state.queues, state.devices[device]
    while top_key(queues, device, PARKED) <= row.memory_bytes - row.used_bytes:
        move(queues, device, LATER, 0.0, op_at(queues, device, PARKED, 0))
    while top_key(queues, device, LATER) <= now:
        op = op_at(queues, device, LATER, 0)
        arrival_s = data_s(state.net, op, device)
        if arrival_s > now:
            move(queues, device, LATER, arrival_s, op)
        elif arrival_s > row.avail_s:
            move(queues, device, ARRIVED, arrival_s, op)
        else:
            move(queues, device, DUE, float(op), op)
    while top_key(queues, device, ARRIVED) <= row.avail_s:
        op = op_at(queues, device, ARRIVED, 0)
        move(queues, device, DUE, float(op), op)


@kernel
def _earliest(state: ScheduleState, device: int, now: float) -> tuple[int, float]:
    """Return op and start of the smallest (earliest start, rank) that could start by now."""
    queues, avail_s = state.queues, state.devices[device].avail_s
    while num_in(queues, device, DUE) + num_in(queues, device, ARRIVED) > 0:
        heap = DUE if num_in(queues, device, DUE) > 0 else ARRIVED
        op = op_at(queues, device, heap, 0)
        if not _fits_or_parks(state, op, device):
            continue
        arrival_s = data_s(state.net, op, device)
        expected_s = avail_s if heap == DUE else top_key(queues, device, ARRIVED)
        if arrival_s <= expected_s:
            return op, max(arrival_s, avail_s)
        # Transfers committed since the op was sorted in have delayed its inputs: sort again.
        move(queues, device, ARRIVED if arrival_s <= now else LATER, arrival_s, op)
    return -1, np.inf


@kernel
def _awaited(state: ScheduleState, device: int, now: float) -> int:
    """Return the favourite for which a device stays awake; -1 if none."""
    ops, last = state.net.ops, state.devices[device].last_op
    favourite: int = ops[last].favourite if last >= 0 else -1
    if favourite < 0 or ops[favourite].status == PLACED:
        return -1
    for index in range(ops[favourite].read_start, ops[favourite].read_stop):
        producer = state.net.tensors[state.net.reads[index]].producer
        if producer >= 0 and ops[producer].status != PLACED:
            return -1
    here_s = _earliest_s(state, favourite, device)
    if here_s == np.inf:
        return -1
    if ops[favourite].status != READY and here_s - now > ops[last].spared_s:
        return -1
    return -1 if _starts_before(state, favourite, here_s) else favourite


@kernel
def _is_before(state: ScheduleState, op: int, device: int, here_s: float) -> bool:
    """True if a device could start an op before ``here_s``."""
    if state.devices[device].avail_s >= here_s:
        return False
    return _earliest_s(state, op, device) < here_s


@kernel
def _starts_before(state: ScheduleState, op: int, here_s: float) -> bool:
    """True if some device could start an op before ``here_s``."""
    net, found = state.net, False
    tensor, sent_s = remote_s(net, op)
    if tensor < 0 or sent_s < here_s:
        for device in range(len(state.devices)):
            found = found or _is_before(state, op, device, here_s)
        return found
    # By then that tensor cannot have reached another device: only its holders are candidates.
    found = _is_before(state, op, owner_device(net, tensor), here_s)
    copy = net.tensors[tensor].last_copy
    while copy >= 0 and not found:
        found = _is_before(state, op, net.copies[copy].device, here_s)
        copy = net.copies[copy].older
    return found


@kernel
def _urgent_s(state: ScheduleState, op: int, now: float) -> float:
    """Time from which an op could start on every device that can hold it; infinite if after now."""
    latest_s = 0.0
    for device in range(len(state.devices)):
        earliest_s = _earliest_s(state, op, device)
        if earliest_s == np.inf:
            continue
        if earliest_s > now:
            return np.inf
        latest_s = max(latest_s, earliest_s)
    return latest_s


@kernel
def _only_bound_are_urgent(state: ScheduleState, now: float) -> bool:
    """True if a device that can run and hold every op is busy, so no unbound op can be urgent."""
    for device in range(len(state.devices)):
        row = state.devices[device]
        has_capacity = row.peak_bytes + state.counts[0].most_bytes <= row.memory_bytes
        if row.avail_s > now and row.runs_all and has_capacity:
            return True
    return False


@kernel
def _most_urgent(state: ScheduleState, device: int, now: float) -> int:
    """Return the op that has been startable on all devices longest, ties by rank; -1 if none is."""
    queues, row = state.queues, state.devices[device]
    best, best_s, only_bound = -1, np.inf, _only_bound_are_urgent(state, now)
    if only_bound and row.num_bound == 0:
        return best
    for heap in (DUE, ARRIVED):
        for at in range(num_in(queues, device, heap)):
            op = op_at(queues, device, heap, at)
            if only_bound and state.groups[state.net.ops[op].group].bound < 0:
                continue
            earliest_s = _earliest_s(state, op, device)
            if earliest_s > now:
                # Transfers committed since the op was sorted in have delayed its inputs.
                row.wake_s = min(row.wake_s, earliest_s)
                continue
            urgent_s = _urgent_s(state, op, now)
            if urgent_s < best_s or (urgent_s == best_s and op < best):
                best, best_s = op, urgent_s
    return best


@kernel
def offer(state: ScheduleState, device: int, now: float) -> tuple[int, float]:
    """Return the op that a free device would start now, and its start; -1 if none."""
    row = state.devices[device]
    _sort_by_now(state, device, now)
    favourite = _awaited(state, device, now)
    if favourite < 0:
        return _earliest(state, device, now)
    op = _most_urgent(state, device, now)
    op = favourite if op < 0 else op
    if state.net.ops[op].status != READY:
        return -1, np.inf
    start_s = _earliest_s(state, op, device)
    if start_s <= now:
        return op, start_s
    row.wake_s = min(row.wake_s, start_s)
    return -1, np.inf


@kernel
def _look_again(state: ScheduleState, op: int, device: int) -> None:
    """Recompute the key of an op on a device and put it back into the heap of later ops."""
    move(state.queues, device, LATER, data_s(state.net, op, device), op)


@kernel
def _join(state: ScheduleState, op: int, device: int) -> None:
    """Put a ready op into a device's heaps, unless it is there or may not run there."""
    if state.queues.where[op, device] < 0 and may_run(state, op, device):
        _look_again(state, op, device)


@kernel
def _queue_up(state: ScheduleState, op: int, now: float) -> None:
    """Put a ready op into the heaps of the devices that could have its inputs by now.

    One of its inputs decides: until that tensor could have been sent anywhere, only the devices
    that hold it need to be considered.
    """
    net = state.net
    tensor, earliest_s = remote_s(net, op)
    if tensor < 0 or earliest_s <= now:
        for device in range(len(state.devices)):
            _join(state, op, device)
        return
    push(state.remote, ZERO, earliest_s, op)
    _join(state, op, owner_device(net, tensor))
    copy = net.tensors[tensor].last_copy
    while copy >= 0:
        _join(state, op, net.copies[copy].device)
        copy = net.copies[copy].older


@kernel
def _get_ready(state: ScheduleState, op: int, now: float) -> None:
    """Mark an op as ready, because all its predecessors have ended, and put it into heaps."""
    row = state.net.ops[op]
    row.status = READY
    bound = state.groups[row.group].bound
    if bound >= 0:
        state.devices[bound].num_bound += 1
        _join(state, op, bound)
    else:
        _queue_up(state, op, now)


@kernel
def _queue_up_remote(state: ScheduleState, now: float) -> None:
    """Put ready ops whose inputs could have been sent by now into the heaps of further devices."""
    while state.remote.size[0] > 0 and state.remote.key[0] <= now:
        op = pop(state.remote, ZERO)
        row = state.net.ops[op]
        if row.status == READY and state.groups[row.group].bound < 0:
            _queue_up(state, op, now)


@kernel
def _set_owner(state: ScheduleState, family: int, device: int) -> None:
    """Store a storage that exists before the step on a device, for the rest of the schedule."""
    where = state.queues.where
    state.net.tensors[family].owner = device
    # This storage no longer adds to what its other readers need, so parked ops may fit now.
    for index in range(state.family_ptr[family], state.family_ptr[family + 1]):
        group = state.groups[state.readers[index]]
        if group.bound >= 0:
            continue
        for at in range(group.member_start, group.member_stop):
            op = state.members[at]
            if state.net.ops[op].status != READY:
                continue
            for other in range(len(state.devices)):
                if where[op, other] >= 0 and where[op, other] % NUM_HEAPS == PARKED:
                    _look_again(state, op, other)


@kernel
def _bind_group(state: ScheduleState, number: int, device: int) -> None:
    """Bind a group to the device of its first placed op and reserve the storages that it owns."""
    group = state.groups[number]
    group.bound = device
    for index in range(group.family_start, group.family_stop):
        if state.net.tensors[state.families[index]].owner < 0:
            _set_owner(state, state.families[index], device)
    for index in range(group.member_start, group.member_stop):
        member = state.members[index]
        if state.net.ops[member].status != READY:
            continue
        # The group may run on this device only: its ready ops leave the heaps of all others.
        for other in range(len(state.devices)):
            if other != device:
                remove(state.queues, other, member)
        state.devices[device].num_bound += 1
        _look_again(state, member, device)


@kernel
def _fetch(state: ScheduleState, tensor: int, device: int) -> None:
    """Send a tensor to a device and recompute the keys of its other ready readers there."""
    copy = state.counts[0].num_copies + 0
    state.counts[0].num_copies += 1
    send(state.net, copy, tensor, device)
    add_copy(state, tensor, copy, device)
    row = state.net.tensors[tensor]
    # The tensor arrives here now, so other readers of it may start earlier than estimated.
    for index in range(row.user_start, row.user_stop):
        user = state.users[index]
        if state.net.ops[user].status == READY and may_run(state, user, device):
            _look_again(state, user, device)


@kernel
def _commit(state: ScheduleState, op: int, device: int, now: float) -> None:
    """Place an op: allocate its memory, send its inputs, and start it."""
    net, row, place = state.net, state.net.ops[op], state.devices[device]
    row.status = PLACED
    for other in range(len(state.devices)):
        # Memory is taken first: binding the group and sending inputs change what is missing.
        remove(state.queues, other, op)
    take(state, op, device)
    if state.groups[row.group].bound < 0:
        _bind_group(state, row.group, device)
    else:
        place.num_bound -= 1
    for index in range(row.read_start, row.read_stop):
        if is_missing(net, net.reads[index], device):
            _fetch(state, net.reads[index], device)
    row.device = device
    row.start_s = max(max(data_s(net, op, device), place.avail_s), now)
    row.end_s = row.start_s + state.kind_s[place.kind, op]
    place.avail_s = row.end_s
    place.last_op = op
    push(state.running, ZERO, row.end_s, op)
    for tensor in range(row.made_start, row.made_stop):
        net.tensors[tensor].made_s = row.end_s
        add_result(state, tensor, device)


@kernel
def _end(state: ScheduleState, op: int, now: float) -> None:
    """End an op: release tensors without remaining readers, and mark ops that become ready."""
    net, row = state.net, state.net.ops[op]
    state.devices[row.device].used_bytes -= row.workspace_bytes
    for index in range(row.read_start, row.read_stop):
        tensor = net.tensors[net.reads[index]]
        tensor.num_left -= 1
        if tensor.num_left == 0:
            release(state, net.reads[index])
    for number in range(row.made_start, row.made_stop):
        tensor = net.tensors[number]
        if tensor.num_left == 0:
            release(state, number)
        for index in range(tensor.user_start, tensor.user_stop):
            user = net.ops[state.users[index]]
            user.waits -= 1
            if user.waits == 0:
                _get_ready(state, state.users[index], now)


@kernel
def _best_offer(state: ScheduleState, now: float) -> tuple[int, int]:
    """Return op and device of the smallest (earliest start, rank, device) offered; -1 if none."""
    best, best_device, best_s = -1, -1, np.inf
    for device in range(len(state.devices)):
        # Wake times are written anew by the offers below.
        state.devices[device].wake_s = np.inf
        if state.devices[device].avail_s > now or not has_work(state.queues, device, now):
            continue
        op, start_s = offer(state, device, now)
        # Strict comparison: of equal offers the device with the smallest number wins.
        if op >= 0 and (start_s < best_s or (start_s == best_s and op < best)):
            best, best_device, best_s = op, device, start_s
    return best, best_device


@kernel
def _next_event_s(state: ScheduleState, now: float) -> float:
    """Time of the next possible change: an op ends, or inputs may have reached a free device."""
    event_s = state.running.key[0] if state.running.size[0] > 0 else np.inf
    if state.remote.size[0] > 0:
        event_s = min(event_s, state.remote.key[0])
    for device in range(len(state.devices)):
        row = state.devices[device]
        if row.avail_s <= now:
            event_s = min(event_s, min(row.wake_s, top_key(state.queues, device, LATER)))
    return event_s


@kernel
def _report_stuck(state: ScheduleState) -> None:
    """Record the first ready op, as no op fits, and the least bytes it lacks on any device."""
    op = 0
    while state.net.ops[op].status != READY:
        op += 1
    least = np.iinfo(np.int64).max
    # Every ready op is stuck here; the first one stands for all in the message.
    for device in range(len(state.devices)):
        if may_run(state, op, device):
            least = min(least, lacking_bytes(state, op, device))
    state.counts[0].stuck_op = op
    state.counts[0].stuck_bytes = least


@kernel
def run(state: ScheduleState) -> None:
    """Schedule every op; writes devices and times to ``state``, or the op that fits nowhere."""
    num_left = len(state.net.ops)
    for op in range(num_left):
        if state.net.ops[op].waits == 0:
            _get_ready(state, op, 0.0)
    now = 0.0
    while True:
        # All ends at this instant come before any offer, so that freed bytes can be used.
        while state.running.size[0] > 0 and state.running.key[0] <= now:
            _end(state, pop(state.running, ZERO), now)
            num_left -= 1
        _queue_up_remote(state, now)
        op, device = _best_offer(state, now)
        if op >= 0:
            _commit(state, op, device, now)
            continue
        if num_left == 0:
            return
        now = _next_event_s(state, now)
        if now == np.inf:
            _report_stuck(state)
            return
