"""What moving a unit might gain, compiled: paths through its ops as they would be elsewhere."""

from __future__ import annotations

from typing import NamedTuple

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel
from hocket.simulate.instructions import Given, PlaceTable, RunTable


class SimulatedStep(NamedTuple):
    """The simulated step."""

    end_s: FloatArray
    latest_s: FloatArray
    """Latest start of each op that does not make the step longer."""
    unit_of: LongArray
    is_critical: LongArray
    """Per op, 0 or 1."""
    step_s: FloatArray
    """One number."""
    by_device: LongArray
    """Ops of each device in the order of their starts."""
    device_ptr: LongArray
    """Where those of each device begin in ``by_device``."""
    started_s: FloatArray
    """Their starts."""
    busy_s: FloatArray
    """Seconds that the device worked before each of them."""


@kernel
def _transfer_s(given: Given, tensor: int, src: int, dst: int) -> float:
    if src == dst:
        return 0.0
    pair = src * len(given.row) + dst
    seconds: float = (
        given.latency_s[pair] + given.work[tensor] * given.hops[pair] / given.slowest[pair]
    )
    return seconds


@kernel
def _busy_until(step: SimulatedStep, runs: RunTable, device: int, time_s: float) -> float:
    """Seconds that a device works before a time."""
    first, high = step.device_ptr[device], step.device_ptr[device + 1]
    low = first
    while low < high:
        middle = (low + high) >> 1
        if step.started_s[middle] < time_s:
            low = middle + 1
        else:
            high = middle
    if low == first:
        return 0.0
    last_s = runs.duration_s[step.by_device[low - 1]]
    busy_s: float = step.busy_s[low - 1] + min(last_s, time_s - step.started_s[low - 1])
    return busy_s


@kernel
def _path_s(
    given: Given, runs: RunTable, places: PlaceTable, step: SimulatedStep, op: int, device: int
) -> float:
    """The longest path through an op if it ran on a device, and what is in its way there."""
    unit, head_s, tail_s = step.unit_of[op], 0.0, 0.0
    for index in range(runs.read_ptr[op], runs.read_ptr[op + 1]):
        tensor = given.reads[index]
        producer = given.home_op[tensor]
        if not given.is_made[tensor]:
            continue
        sent_s = 0.0
        if step.unit_of[producer] != unit:
            sent_s = _transfer_s(given, tensor, runs.device[producer], device)
        head_s = max(head_s, step.end_s[producer] + sent_s)
    for tensor in range(runs.made_ptr[op], runs.made_ptr[op + 1]):
        for index in range(given.user_ptr[tensor], given.user_ptr[tensor + 1]):
            user = places.reader[given.user_read[index]]
            sent_s = 0.0
            if step.unit_of[user] != unit:
                sent_s = _transfer_s(given, tensor, device, runs.device[user])
            tail_s = max(tail_s, step.step_s[0] - step.latest_s[user] + sent_s)
    duration_s: float = given.op_s[given.row[device], op]
    occupied_s = 0.0
    if device != runs.device[op]:
        occupied_s = _busy_until(step, runs, device, head_s + duration_s) - _busy_until(
            step, runs, device, head_s
        )
    return head_s + duration_s + occupied_s + tail_s


@kernel
def fill_gains(
    given: Given,
    runs: RunTable,
    places: PlaceTable,
    step: SimulatedStep,
    listed_op: LongArray,
    listed_row: LongArray,
    gain_s: FloatArray,
) -> None:
    """Add up, per row and device, what the listed ops would gain there.

    An op on the critical path gains what its longest path gets shorter; another can only lose, by
    what its path would be longer than the step.
    """
    for index in range(len(listed_op)):
        op = listed_op[index]
        for device in range(len(given.row)):
            gain = step.step_s[0] - _path_s(given, runs, places, step, op, device)
            gain_s[listed_row[index], device] += gain if step.is_critical[op] else min(gain, 0.0)
