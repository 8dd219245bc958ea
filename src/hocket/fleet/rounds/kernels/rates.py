"""Rates of running jobs: alone or beside another, on one server or spread over several."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import LongArray
from hocket.fleet.rounds.state import Jobs
from hocket.fleet.rounds.tables import Speeds
from hocket.kernels import kernel


@kernel
def row_of(jobs: Jobs, number: int) -> int:
    """Find the row of a job by bisection; -1 if it is not there."""
    low, high = 0, jobs.rows.shape[0]
    if number < 0:
        return -1
    while low < high:
        middle = (low + high) >> 1
        if jobs.rows.number[middle] < number:
            low = middle + 1
        else:
            high = middle
    return low if low < jobs.rows.shape[0] and jobs.rows.number[low] == number else -1


@kernel
def speed_on(jobs: Jobs, i: int, device_type: int, largest_server: LongArray) -> float:
    """Steps per second of a job on a device type, on as few servers as possible."""
    speed: float = jobs.steps_per_s[i, device_type]
    if jobs.rows.gang[i] > largest_server[device_type]:
        speed = jobs.spread_steps_per_s[i, device_type]
    return speed


@kernel
def set_rate(jobs: Jobs, i: int, partner: int, speeds: Speeds) -> None:
    """Set the steps per second of a running job; ``partner`` is a row, -1 for none."""
    device_type = jobs.rows.device_type[i]
    alone = jobs.steps_per_s[i, device_type]
    rate = jobs.spread_steps_per_s[i, device_type] if jobs.rows.is_spread[i] else alone
    if partner >= 0:
        beside = speeds.beside[jobs.rows.profile[i], jobs.rows.profile[partner], device_type]
        # Pairs are measured on one server; spread over several, a job slows down by the same factor
        # as alone.
        rate = beside * (rate / alone) if jobs.rows.is_spread[i] and alone > 0.0 else beside
    if speeds.whole_s > 0.0:
        whole = np.floor(rate * speeds.whole_s)
        if whole > 0.0:
            rate = whole / speeds.whole_s
    jobs.rows.rate[i] = rate


@kernel
def renew_rate(jobs: Jobs, i: int, speeds: Speeds) -> None:
    """Set the rate of a running job after its throughput was measured."""
    set_rate(jobs, i, row_of(jobs, jobs.rows.partner[i]), speeds)
