"""Bytes held on each device: taken, released after the last use, and logged. O(1) per change."""

from __future__ import annotations

from hocket.kernels import kernel
from hocket.simulate.instructions import PlaceTable
from hocket.simulate.state import MemoryState


@kernel
def hold(memory: MemoryState, device: int, num_bytes: int, now: float) -> None:
    """Take bytes, or with a negative number give them back."""
    if num_bytes == 0:
        return
    memory.now[device] += num_bytes
    memory.peak[device] = max(memory.peak[device], memory.now[device])
    entry = memory.last[device]
    if memory.log_time_s[entry] != now:
        entry = memory.size[0]
        memory.size[0] += 1
        memory.last[device] = entry
        memory.log_device[entry] = device
        memory.log_time_s[entry] = now
    memory.log_bytes[entry] = memory.now[device]


@kernel
def use_up(memory: MemoryState, places: PlaceTable, place: int, now: float) -> None:
    """One use of the bytes that ``place`` lives in is over."""
    storage = places.storage[place]
    memory.num_left[storage] -= 1
    if memory.num_left[storage] == 0 and not places.is_kept[storage]:
        hold(memory, places.device[storage], -places.num_bytes[storage], now)
