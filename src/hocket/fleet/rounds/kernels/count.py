"""Work, time and debts up to a moment. O(jobs)."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.rounds.kernels.rates import row_of
from hocket.fleet.rounds.state import Jobs
from hocket.kernels import kernel

_RUNNING, _ENDED = 1, 3


@kernel
def count(
    before: Jobs,
    jobs: Jobs,
    time_s: float,
    earns: bool,
    pair_credit_s: FloatArray,
    pair_amount: FloatArray,
    drops_ended: bool,
) -> int:
    """Copy rows and bring them up to a moment; returns how many there are.

    ``jobs`` has room for all rows of ``before``, and may have more.
    """
    num_jobs = _copy(before, jobs, drops_ended)
    passed_s = 0.0
    # One loop and no calls per job: the arrays of a tuple are passed one by one, every time.
    for i in range(num_jobs):
        since_s, phase = time_s - jobs.rows.counted_s[i], jobs.rows.phase[i]
        if since_s <= 0.0 or phase == _ENDED:
            continue
        passed_s = max(passed_s, since_s)
        jobs.rows.counted_s[i] = time_s
        if phase == _RUNNING:
            kind = jobs.rows.kind[i]
            jobs.rows.held_s[i] += since_s
            jobs.received_s[i, kind] += since_s
            if jobs.rows.partner[i] >= 0:
                jobs.rows.pair_credit_s[i] -= since_s
                _pay_for_pair(before, jobs, i, since_s, pair_credit_s)
            elif earns:
                jobs.credit_s[i, kind] -= since_s
            worked_s = time_s - max(jobs.rows.ready_s[i], time_s - since_s)
            if worked_s > 0.0:
                done = jobs.rows.done_steps[i] + jobs.rows.rate[i] * worked_s
                jobs.rows.done_steps[i] = min(done, jobs.rows.total_steps[i])
        if phase <= _RUNNING:
            target_s = jobs.rows.target_s[i]
            for j in range(jobs.shares.shape[1]):
                target_s += jobs.shares[i, j] * since_s
                if earns:
                    jobs.credit_s[i, j] += jobs.shares[i, j] * since_s
            jobs.rows.target_s[i] = target_s + jobs.rows.pair_share[i] * since_s
            jobs.rows.pair_credit_s[i] += jobs.rows.pair_share[i] * since_s
    for a in range(pair_amount.shape[0]):
        for b in range(a, pair_amount.shape[1]):
            for j in range(pair_amount.shape[2]):
                pair_credit_s[a, b, j] += pair_amount[a, b, j] * passed_s
    return num_jobs


@kernel
def _copy(before: Jobs, jobs: Jobs, drops_ended: bool) -> int:
    num_jobs = 0
    for i in range(before.rows.shape[0]):
        if not (drops_ended and before.rows.phase[i] == _ENDED):
            jobs.rows[num_jobs] = before.rows[i]
            num_jobs += 1
    if num_jobs == before.rows.shape[0]:
        _copy_column(before.steps_per_s, jobs.steps_per_s)
        _copy_column(before.spread_steps_per_s, jobs.spread_steps_per_s)
        _copy_column(before.shares, jobs.shares)
        _copy_column(before.received_s, jobs.received_s)
        _copy_column(before.credit_s, jobs.credit_s)
    else:
        _copy_columns_of_others(before, jobs)
    return num_jobs


@kernel
def _copy_column(before: FloatArray, after: FloatArray) -> None:
    """As one row of numbers: twice as fast as by job and kind."""
    source, target = before.reshape(before.size), after.reshape(after.size)
    for at in range(source.shape[0]):
        target[at] = source[at]


@kernel
def _copy_columns_of_others(before: Jobs, jobs: Jobs) -> None:
    to = 0
    for i in range(before.rows.shape[0]):
        if before.rows.phase[i] != _ENDED:
            for j in range(before.shares.shape[1]):
                jobs.steps_per_s[to, j] = before.steps_per_s[i, j]
                jobs.spread_steps_per_s[to, j] = before.spread_steps_per_s[i, j]
                jobs.shares[to, j] = before.shares[i, j]
                jobs.received_s[to, j] = before.received_s[i, j]
                jobs.credit_s[to, j] = before.credit_s[i, j]
            to += 1


@kernel
def _pay_for_pair(
    before: Jobs, jobs: Jobs, i: int, since_s: float, pair_credit_s: FloatArray
) -> None:
    """The earlier of two that share a device pays for both."""
    if jobs.rows.number[i] < jobs.rows.partner[i]:
        other = row_of(before, jobs.rows.partner[i])
        if other >= 0:
            one, two = jobs.rows.profile[i], before.rows.profile[other]
            pair_credit_s[min(one, two), max(one, two), jobs.rows.kind[i]] -= since_s


@kernel
def first_to_finish(jobs: Jobs) -> tuple[float, int]:
    """When the next running job does its last step at its rate, and its row; infinite for none."""
    first_s, row = np.inf, -1
    for i in range(jobs.rows.shape[0]):
        if jobs.rows.phase[i] == _RUNNING and jobs.rows.rate[i] > 0.0:
            left = jobs.rows.total_steps[i] - jobs.rows.done_steps[i]
            end_s = max(jobs.rows.counted_s[i], jobs.rows.ready_s[i]) + left / jobs.rows.rate[i]
            if end_s < first_s:
                first_s, row = end_s, i
    return first_s, row
