"""What the simulated step looks like to a local search: its critical ops, and estimated gains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray, pointers
from hocket.kernels.containers import table
from hocket.planners.order.slack import latest_starts
from hocket.planners.placement.search.state import NO_SLACK, LocalSearch
from hocket.planners.placement.search.units import SearchUnits

_NEARLY = 0.05
"""Share of the step: ops with more slack than this hardly become critical by one move."""

_MAX_GUESSES = 400_000
"""Pairs of op and device that are looked at; with more, every n-th op stands for the others."""


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
    from hocket.planners.placement.search.gain_kernels import SimulatedStep, fill_gains

    search.show()
    evaluator = search.evaluator
    runs, places, _, _ = evaluator.draft.tables
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
    fill_gains(evaluator.draft.given, runs, places, step, listed_op, listed_row, gain_s)
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
    has = search.evaluator.draft.given.memory_bytes
    is_overfull: BoolArray = search.evaluator.peak_bytes > has
    return is_overfull
