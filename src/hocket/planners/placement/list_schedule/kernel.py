"""The event loop: offers of free devices, commits, ends. See the docstring of this package."""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel
from hocket.kernels.containers import ZERO
from hocket.kernels.heaps import pop, push
from hocket.planners.placement.list_schedule.arrival import (
    data_s,
    home_of,
    is_missing,
    remote_s,
    send,
)
from hocket.planners.placement.list_schedule.memory import (
    add_copy,
    add_result,
    lacking_bytes,
    release,
    take,
)
from hocket.planners.placement.list_schedule.offers import may_run, offer
from hocket.planners.placement.list_schedule.queues import has_work, move, remove, top_key
from hocket.planners.placement.list_schedule.state import (
    LATER,
    NUM_HEAPS,
    PARKED,
    PLACED,
    READY,
    ScheduleState,
)


@kernel
def _look_again(world: ScheduleState, op: int, device: int) -> None:
    """Compute the key of an op anew."""
    move(world.queues, device, LATER, data_s(world.net, op, device), op)


@kernel
def _join(world: ScheduleState, op: int, device: int) -> None:
    """A device can offer a ready op, if it may run it."""
    if world.queues.where[op, device] < 0 and may_run(world, op, device):
        _look_again(world, op, device)


@kernel
def _queue_up(world: ScheduleState, op: int, now: float) -> None:
    """Put a ready op into the queues of the devices that could have its data by now.

    One of the tensors that it reads decides: until that could have been sent anywhere, only the
    devices that hold it are worth a look.
    """
    net = world.net
    tensor, earliest_s = remote_s(net, op)
    if tensor < 0 or earliest_s <= now:
        for device in range(len(world.devices)):
            _join(world, op, device)
        return
    push(world.remote, ZERO, earliest_s, op)
    _join(world, op, home_of(net, tensor))
    copy = net.tensors[tensor].last_copy
    while copy >= 0:
        _join(world, op, net.copies[copy].device)
        copy = net.copies[copy].older


@kernel
def _get_ready(world: ScheduleState, op: int, now: float) -> None:
    """All predecessors of an op have ended."""
    row = world.net.ops[op]
    row.status = READY
    bound = world.groups[row.group].bound
    if bound >= 0:
        world.devices[bound].num_bound += 1
        _join(world, op, bound)
    else:
        _queue_up(world, op, now)


@kernel
def _queue_up_remote(world: ScheduleState, now: float) -> None:
    """Look again at ops whose data may be elsewhere by now."""
    while world.remote.size[0] > 0 and world.remote.key[0] <= now:
        op = pop(world.remote, ZERO)
        row = world.net.ops[op]
        if row.status == READY and world.groups[row.group].bound < 0:
            _queue_up(world, op, now)


@kernel
def _find_home(world: ScheduleState, family: int, device: int) -> None:
    """A storage that exists before the step is on this device from now on."""
    where = world.queues.where
    world.net.tensors[family].home = device
    # Groups that read it take less elsewhere: where their ops were put aside, they may fit now.
    for index in range(world.family_ptr[family], world.family_ptr[family + 1]):
        group = world.groups[world.readers[index]]
        if group.bound >= 0:
            continue
        for at in range(group.member_start, group.member_stop):
            op = world.members[at]
            if world.net.ops[op].status != READY:
                continue
            for other in range(len(world.devices)):
                if where[op, other] >= 0 and where[op, other] % NUM_HEAPS == PARKED:
                    _look_again(world, op, other)


@kernel
def _bind_group(world: ScheduleState, number: int, device: int) -> None:
    """The first op of a group is placed: all of it goes to this device."""
    group = world.groups[number]
    group.bound = device
    for index in range(group.family_start, group.family_stop):
        if world.net.tensors[world.families[index]].home < 0:
            _find_home(world, world.families[index], device)
    for index in range(group.member_start, group.member_stop):
        member = world.members[index]
        if world.net.ops[member].status != READY:
            continue
        for other in range(len(world.devices)):
            if other != device:
                remove(world.queues, other, member)
        world.devices[device].num_bound += 1
        _look_again(world, member, device)


@kernel
def _fetch(world: ScheduleState, tensor: int, device: int) -> None:
    """Send a tensor; its other ready readers could start earlier here."""
    copy = world.counts[0].num_copies + 0
    world.counts[0].num_copies += 1
    send(world.net, copy, tensor, device)
    add_copy(world, tensor, copy, device)
    row = world.net.tensors[tensor]
    for index in range(row.user_start, row.user_stop):
        user = world.users[index]
        if world.net.ops[user].status == READY and may_run(world, user, device):
            _look_again(world, user, device)


@kernel
def _commit(world: ScheduleState, op: int, device: int, now: float) -> None:
    """Place an op: take its memory, bring what it reads, and start it."""
    net, row, place = world.net, world.net.ops[op], world.devices[device]
    row.status = PLACED
    for other in range(len(world.devices)):
        remove(world.queues, other, op)
    take(world, op, device)
    if world.groups[row.group].bound < 0:
        _bind_group(world, row.group, device)
    else:
        place.num_bound -= 1
    for index in range(row.read_start, row.read_stop):
        if is_missing(net, net.reads[index], device):
            _fetch(world, net.reads[index], device)
    row.device = device
    row.start_s = max(max(data_s(net, op, device), place.avail_s), now)
    row.end_s = row.start_s + world.kind_s[place.kind, op]
    place.avail_s = row.end_s
    place.last_op = op
    push(world.running, ZERO, row.end_s, op)
    for tensor in range(row.made_start, row.made_stop):
        net.tensors[tensor].made_s = row.end_s
        add_result(world, tensor, device)


@kernel
def _end(world: ScheduleState, op: int, now: float) -> None:
    """An op ends: release what nobody needs any more, and see which ops become ready."""
    net, row = world.net, world.net.ops[op]
    world.devices[row.device].used_bytes -= row.workspace_bytes
    for index in range(row.read_start, row.read_stop):
        tensor = net.tensors[net.reads[index]]
        tensor.num_left -= 1
        if tensor.num_left == 0:
            release(world, net.reads[index])
    for number in range(row.made_start, row.made_stop):
        tensor = net.tensors[number]
        if tensor.num_left == 0:
            release(world, number)
        for index in range(tensor.user_start, tensor.user_stop):
            user = net.ops[world.users[index]]
            user.waits -= 1
            if user.waits == 0:
                _get_ready(world, world.users[index], now)


@kernel
def _best_offer(world: ScheduleState, now: float) -> tuple[int, int]:
    """The smallest (earliest start, rank, device) that free devices offer; -1 for none."""
    best, best_device, best_s = -1, -1, np.inf
    for device in range(len(world.devices)):
        world.devices[device].wake_s = np.inf
        if world.devices[device].avail_s > now or not has_work(world.queues, device, now):
            continue
        op, start_s = offer(world, device, now)
        if op >= 0 and (start_s < best_s or (start_s == best_s and op < best)):
            best, best_device, best_s = op, device, start_s
    return best, best_device


@kernel
def _next_event_s(world: ScheduleState, now: float) -> float:
    """When something can change: an op ends, or data may be on a free device."""
    event_s = world.running.key[0] if world.running.size[0] > 0 else np.inf
    if world.remote.size[0] > 0:
        event_s = min(event_s, world.remote.key[0])
    for device in range(len(world.devices)):
        row = world.devices[device]
        if row.avail_s <= now:
            event_s = min(event_s, min(row.wake_s, top_key(world.queues, device, LATER)))
    return event_s


@kernel
def _report_stuck(world: ScheduleState) -> None:
    """Nothing fits: name the first ready op, and what it lacks where it lacks least."""
    op = 0
    while world.net.ops[op].status != READY:
        op += 1
    least = np.iinfo(np.int64).max
    for device in range(len(world.devices)):
        if may_run(world, op, device):
            least = min(least, lacking_bytes(world, op, device))
    world.counts[0].stuck_op = op
    world.counts[0].stuck_bytes = least


@kernel
def run(world: ScheduleState) -> None:
    """Schedule every op; ``world`` then tells where, when, or what is stuck."""
    num_left = len(world.net.ops)
    for op in range(num_left):
        if world.net.ops[op].waits == 0:
            _get_ready(world, op, 0.0)
    now = 0.0
    while True:
        while world.running.size[0] > 0 and world.running.key[0] <= now:
            _end(world, pop(world.running, ZERO), now)
            num_left -= 1
        _queue_up_remote(world, now)
        op, device = _best_offer(world, now)
        if op >= 0:
            _commit(world, op, device, now)
            continue
        if num_left == 0:
            return
        now = _next_event_s(world, now)
        if now == np.inf:
            _report_stuck(world)
            return
