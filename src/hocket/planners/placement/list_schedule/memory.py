"""What an op would take on a device, taking it, and releasing what nobody needs any more."""

from __future__ import annotations

import numpy as np

from hocket.kernels import kernel
from hocket.planners.placement.list_schedule.arrival import copy_on, is_missing
from hocket.planners.placement.list_schedule.state import ScheduleState


@kernel
def _needs(world: ScheduleState, op: int, device: int) -> tuple[int, int]:
    """Bytes that an op would take, and those of them that are there when the step begins."""
    net, row = world.net, world.net.ops[op]
    need, early = row.taken_bytes + 0, row.taken_bytes * 0
    for index in range(row.read_start, row.read_stop):
        tensor = net.reads[index]
        if is_missing(net, tensor, device):
            need += net.tensors[tensor].num_bytes
            if net.tensors[tensor].is_everywhere:
                early += net.tensors[tensor].num_bytes
    group = world.groups[row.group]
    if group.bound < 0:
        need += group.reserve_bytes
        for index in range(group.family_start, group.family_stop):
            family = net.tensors[world.families[index]]
            if family.home < 0:
                need += family.num_bytes
                early += family.num_bytes
    return need, early


@kernel
def lacking_bytes(world: ScheduleState, op: int, device: int) -> int:
    """Bytes that are missing for an op on a device; 0 or less where it fits."""
    row = world.devices[device]
    at_most: int = row.peak_bytes + world.net.ops[op].most_bytes - row.memory_bytes
    if at_most <= 0:
        return at_most
    need, early = _needs(world, op, device)
    lacking: int = max(row.used_bytes + need, row.peak_bytes + early) - row.memory_bytes
    return lacking


@kernel
def fits_at_bytes(world: ScheduleState, op: int, device: int) -> float:
    """How many free bytes would do for an op; infinite where no release can help."""
    need, early = _needs(world, op, device)
    if world.devices[device].peak_bytes + early > world.devices[device].memory_bytes:
        return np.inf
    return float(need)


@kernel
def take(world: ScheduleState, op: int, device: int) -> None:
    """Count what an op takes; before its tensors are sent and its group is bound."""
    row = world.devices[device]
    need, early = _needs(world, op, device)
    row.used_bytes += need
    row.peak_bytes = max(row.peak_bytes + early, row.used_bytes)


@kernel
def add_copy(world: ScheduleState, tensor: int, copy: int, device: int) -> None:
    """The storage of a copy."""
    storage = world.storages[copy + len(world.net.tensors)]
    storage.device = device
    storage.num_bytes = world.net.tensors[tensor].num_bytes
    storage.num_living = 1
    storage.is_kept = world.net.tensors[tensor].is_everywhere


@kernel
def add_result(world: ScheduleState, tensor: int, device: int) -> None:
    """The storage of what a placed op makes: its own, or that of the tensor it is an alias of."""
    row = world.net.tensors[tensor]
    row.home = device
    number = tensor
    if row.alias_of >= 0:
        copy = copy_on(world.net, row.alias_of, device)
        own = world.net.tensors[row.alias_of].storage
        number = copy + len(world.net.tensors) if copy >= 0 else own
    row.storage = number
    if number < 0:
        return
    storage = world.storages[number]
    storage.num_living += 1
    if row.is_held:
        storage.is_kept = 1
    if row.alias_of < 0:
        storage.device = device
        storage.num_bytes = row.num_bytes


@kernel
def _leave(world: ScheduleState, number: int) -> None:
    """One of the tensors in a storage is not needed any more."""
    storage = world.storages[number]
    storage.num_living -= 1
    if storage.num_living == 0 and not storage.is_kept:
        world.devices[storage.device].used_bytes -= storage.num_bytes


@kernel
def release(world: ScheduleState, tensor: int) -> None:
    """All readers of a tensor have ended."""
    row = world.net.tensors[tensor]
    if row.storage >= 0:
        _leave(world, row.storage)
    copy = row.last_copy
    while copy >= 0:
        _leave(world, copy + len(world.net.tensors))
        copy = world.net.copies[copy].older
