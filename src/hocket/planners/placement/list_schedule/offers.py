"""What a free device would start now: the earliest op, or what an awake device takes."""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel
from hocket.planners.placement.list_schedule.arrival import data_s, home_of, remote_s
from hocket.planners.placement.list_schedule.memory import fits_at_bytes, lacking_bytes
from hocket.planners.placement.list_schedule.queues import move, num_in, op_at, top_key
from hocket.planners.placement.list_schedule.state import (
    ARRIVED,
    DUE,
    LATER,
    PARKED,
    PLACED,
    READY,
    ScheduleState,
)


@kernel
def may_run(world: ScheduleState, op: int, device: int) -> bool:
    """Whether an op may run on a device, memory aside."""
    bound: int = world.groups[world.net.ops[op].group].bound
    if bound >= 0:
        return bound == device
    seconds: float = world.kind_s[world.devices[device].kind, op]
    return seconds < np.inf


@kernel
def _earliest_s(world: ScheduleState, op: int, device: int) -> float:
    """When an op could start on a device; infinite where it may not run or does not fit."""
    if not may_run(world, op, device) or lacking_bytes(world, op, device) > 0:
        return np.inf
    avail_s: float = world.devices[device].avail_s
    return max(data_s(world.net, op, device), avail_s)


@kernel
def _fits_or_parks(world: ScheduleState, op: int, device: int) -> bool:
    """Whether an op fits now; if not, it is put aside until bytes are released."""
    if lacking_bytes(world, op, device) <= 0:
        return True
    move(world.queues, device, PARKED, fits_at_bytes(world, op, device), op)
    return False


@kernel
def _sort_by_now(world: ScheduleState, device: int, now: float) -> None:
    """Ops that may fit again, and ops whose data may have come, go to the heap that is theirs."""
    queues, row = world.queues, world.devices[device]
    while top_key(queues, device, PARKED) <= row.memory_bytes - row.used_bytes:
        move(queues, device, LATER, 0.0, op_at(queues, device, PARKED, 0))
    while top_key(queues, device, LATER) <= now:
        op = op_at(queues, device, LATER, 0)
        arrival_s = data_s(world.net, op, device)
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
def _earliest(world: ScheduleState, device: int, now: float) -> tuple[int, float]:
    """The op with the smallest (earliest start, rank) that could start by now, and its start."""
    queues, avail_s = world.queues, world.devices[device].avail_s
    while num_in(queues, device, DUE) + num_in(queues, device, ARRIVED) > 0:
        heap = DUE if num_in(queues, device, DUE) > 0 else ARRIVED
        op = op_at(queues, device, heap, 0)
        if not _fits_or_parks(world, op, device):
            continue
        arrival_s = data_s(world.net, op, device)
        expected_s = avail_s if heap == DUE else top_key(queues, device, ARRIVED)
        if arrival_s <= expected_s:
            return op, max(arrival_s, avail_s)
        # Queues have moved since it was sorted in here.
        move(queues, device, ARRIVED if arrival_s <= now else LATER, arrival_s, op)
    return -1, np.inf


@kernel
def _awaited(world: ScheduleState, device: int, now: float) -> int:
    """The favourite for which a device stays awake; -1 for none."""
    ops, last = world.net.ops, world.devices[device].last_op
    favourite: int = ops[last].favourite if last >= 0 else -1
    if favourite < 0 or ops[favourite].status == PLACED:
        return -1
    for index in range(ops[favourite].read_start, ops[favourite].read_stop):
        producer = world.net.tensors[world.net.reads[index]].producer
        if producer >= 0 and ops[producer].status != PLACED:
            return -1
    here_s = _earliest_s(world, favourite, device)
    if here_s == np.inf:
        return -1
    if ops[favourite].status != READY and here_s - now > ops[last].spared_s:
        return -1
    return -1 if _starts_before(world, favourite, here_s) else favourite


@kernel
def _is_before(world: ScheduleState, op: int, device: int, here_s: float) -> bool:
    """Whether a device could start an op before the given time."""
    if world.devices[device].avail_s >= here_s:
        return False
    return _earliest_s(world, op, device) < here_s


@kernel
def _starts_before(world: ScheduleState, op: int, here_s: float) -> bool:
    """Whether some device could start an op before the given time."""
    net, found = world.net, False
    tensor, sent_s = remote_s(net, op)
    if tensor < 0 or sent_s < here_s:
        for device in range(len(world.devices)):
            found = found or _is_before(world, op, device, here_s)
        return found
    # That tensor cannot have been sent by then: only devices that hold it come into question.
    found = _is_before(world, op, home_of(net, tensor), here_s)
    copy = net.tensors[tensor].last_copy
    while copy >= 0 and not found:
        found = _is_before(world, op, net.copies[copy].device, here_s)
        copy = net.copies[copy].older
    return found


@kernel
def _urgent_s(world: ScheduleState, op: int, now: float) -> float:
    """When an op could start on every device that can hold it; infinite if after now."""
    latest_s = 0.0
    for device in range(len(world.devices)):
        earliest_s = _earliest_s(world, op, device)
        if earliest_s == np.inf:
            continue
        if earliest_s > now:
            return np.inf
        latest_s = max(latest_s, earliest_s)
    return latest_s


@kernel
def _only_bound_are_urgent(world: ScheduleState, now: float) -> bool:
    """Whether a device that any op could wait for is busy: then no op can start everywhere."""
    for device in range(len(world.devices)):
        row = world.devices[device]
        has_room = row.peak_bytes + world.counts[0].most_bytes <= row.memory_bytes
        if row.avail_s > now and row.runs_all and has_room:
            return True
    return False


@kernel
def _most_urgent(world: ScheduleState, device: int, now: float) -> int:
    """The op with the smallest (time when it can start everywhere, rank) by now; -1 for none."""
    queues, row = world.queues, world.devices[device]
    best, best_s, only_bound = -1, np.inf, _only_bound_are_urgent(world, now)
    if only_bound and row.num_bound == 0:
        return best
    for heap in (DUE, ARRIVED):
        for at in range(num_in(queues, device, heap)):
            op = op_at(queues, device, heap, at)
            if only_bound and world.groups[world.net.ops[op].group].bound < 0:
                continue
            earliest_s = _earliest_s(world, op, device)
            if earliest_s > now:
                # Queues have moved since it was sorted in here.
                row.wake_s = min(row.wake_s, earliest_s)
                continue
            urgent_s = _urgent_s(world, op, now)
            if urgent_s < best_s or (urgent_s == best_s and op < best):
                best, best_s = op, urgent_s
    return best


@kernel
def offer(world: ScheduleState, device: int, now: float) -> tuple[int, float]:
    """The op that a free device would start now, and when; -1 for none."""
    row = world.devices[device]
    _sort_by_now(world, device, now)
    favourite = _awaited(world, device, now)
    if favourite < 0:
        return _earliest(world, device, now)
    op = _most_urgent(world, device, now)
    op = favourite if op < 0 else op
    if world.net.ops[op].status != READY:
        return -1, np.inf
    start_s = _earliest_s(world, op, device)
    if start_s <= now:
        return op, start_s
    row.wake_s = min(row.wake_s, start_s)
    return -1, np.inf
