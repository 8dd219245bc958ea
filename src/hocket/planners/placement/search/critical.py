"""Analysis of a simulated step for local search: critical ops and estimated gains of moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray, pointers
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.planners.order.levels import latest_starts
from hocket.planners.placement.search.state import NO_SLACK, LocalSearch
from hocket.planners.placement.search.units import SearchUnits
from hocket.simulate.instructions import Given, PlaceTable, RunTable

# What moving a unit might gain, compiled: paths through its ops as they would be elsewhere.


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
    """The longest path through an op if it ran on a device, plus the work that delays it there."""
    unit, head_s, tail_s = step.unit_of[op], 0.0, 0.0
    for index in range(runs.read_ptr[op], runs.read_ptr[op + 1]):
        tensor = given.reads[index]
        producer = given.owner_op[tensor]
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


_NEARLY = 0.05
"""Share of the step: ops with more slack than this hardly become critical by one move."""

_MAX_GUESSES = 400_000
"""Pairs of op and device that are evaluated; beyond that, only every n-th op is."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Critical:
    """The critical part of the step that a search shows."""

    is_critical: BoolArray
    """Per op."""
    units: LongArray
    """Units with critical ops, ascending."""
    gain_s: FloatArray
    """[unit of ``units``, device]: estimated; minus infinity where it is or cannot run."""
    by_device: LongArray
    """Ops of each device in the order of their starts."""
    device_ptr: LongArray
    """Parts of ``by_device``."""


def find_critical(search: LocalSearch, units: SearchUnits) -> Critical:
    """The critical part of the present plan."""

    search.show()
    evaluator = search.evaluator
    runs, places, _, _ = evaluator.buffers.tables
    start_s, end_s, step_s = evaluator.op_start_s, evaluator.op_end_s, search.score.step_s
    latest_s = latest_starts(evaluator, keeps_order=True)
    slack_s = latest_s - start_s
    is_critical = slack_s <= NO_SLACK * step_s
    is_critical |= _is_overfull(search)[search.device_of]
    by_device = np.lexsort((end_s, start_s, search.device_of))
    num_devices = search.problem.cluster.num_devices
    device_ptr = pointers(np.bincount(search.device_of, minlength=num_devices))
    duration_s = runs.duration_s[by_device]
    before_s = np.concatenate(([0.0], np.cumsum(duration_s)))[:-1]
    before_s -= np.append(before_s, 0.0)[device_ptr[:-1]][search.device_of[by_device]]
    chosen = np.unique(units.unit_of[is_critical]).astype(np.int64)
    listed_op, listed_row = units.ops_of_all(chosen)
    matters = is_critical[listed_op] | (slack_s[listed_op] < _NEARLY * step_s)
    every = 1 + int(matters.sum()) * num_devices // _MAX_GUESSES
    listed_op, listed_row = listed_op[matters][::every], listed_row[matters][::every]
    gain_s = np.zeros((len(chosen), len(device_ptr) - 1))
    step = SimulatedStep(
        end_s=end_s,
        latest_s=latest_s,
        unit_of=table(units.unit_of, np.int64),
        is_critical=table(is_critical, np.int64),
        step_s=np.array([step_s]),
        by_device=by_device,
        device_ptr=device_ptr,
        started_s=start_s[by_device],
        busy_s=before_s,
    )
    fill_gains(evaluator.buffers.given, runs, places, step, listed_op, listed_row, gain_s)
    gain_s[~units.can_run[:, chosen].T] = -np.inf
    first = units.groups.ops[units.groups.ptr[chosen]]
    gain_s[np.arange(len(chosen)), search.device_of[first]] = -np.inf
    return Critical(
        is_critical=is_critical,
        units=chosen,
        gain_s=gain_s,
        by_device=by_device,
        device_ptr=device_ptr,
    )


def _is_overfull(search: LocalSearch) -> BoolArray:
    """Devices that hold more than they have: everything there is worth moving."""
    has = search.evaluator.buffers.given.memory_bytes
    is_overfull: BoolArray = search.evaluator.peak_bytes > has
    return is_overfull
