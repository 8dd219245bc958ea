"""Work, time and debts up to a moment. O(jobs)."""

from __future__ import annotations

import numpy as np

from hocket.arrays import FloatArray
from hocket.compiled.jit import compiled, compiled_entry
from hocket.fleet.rounds.kernels.rates import row_of
from hocket.fleet.rounds.state import Jobs

_RUNNING, _PAUSED, _ENDED = 1, 2, 3


@compiled_entry("hocket.fleet.rounds.state", "hocket.fleet.rounds.kernels.rates")
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
    num_kinds = before.shares.shape[1]
    passed_s, num_jobs = 0.0, 0
    for i in range(before.shares.shape[0]):
        if not (drops_ended and before.rows.phase[i] == _ENDED):
            _copy(before, i, jobs, num_jobs)
            num_jobs += 1
    for i in range(num_jobs):
        since_s = time_s - jobs.rows.counted_s[i]
        if since_s <= 0.0 or jobs.rows.phase[i] == _ENDED:
            continue
        passed_s = max(passed_s, since_s)
        if jobs.rows.phase[i] == _RUNNING:
            _work(before, jobs, i, time_s, since_s, earns, pair_credit_s)
        if jobs.rows.phase[i] != _PAUSED:
            _owe(jobs, i, since_s, earns)
        jobs.rows.counted_s[i] = time_s
    for a in range(pair_amount.shape[0]):
        for b in range(a, pair_amount.shape[1]):
            for j in range(num_kinds):
                pair_credit_s[a, b, j] += pair_amount[a, b, j] * passed_s
    return num_jobs


@compiled
def _copy(before: Jobs, i: int, jobs: Jobs, to: int) -> None:
    jobs.rows[to] = before.rows[i]
    for j in range(before.shares.shape[1]):
        jobs.steps_per_s[to, j] = before.steps_per_s[i, j]
        jobs.spread_steps_per_s[to, j] = before.spread_steps_per_s[i, j]
        jobs.shares[to, j] = before.shares[i, j]
        jobs.received_s[to, j] = before.received_s[i, j]
        jobs.credit_s[to, j] = before.credit_s[i, j]


@compiled
def _owe(jobs: Jobs, i: int, since_s: float, earns: bool) -> None:
    for j in range(jobs.shares.shape[1]):
        jobs.rows.target_s[i] += jobs.shares[i, j] * since_s
        if earns:
            jobs.credit_s[i, j] += jobs.shares[i, j] * since_s
    jobs.rows.target_s[i] += jobs.rows.pair_share[i] * since_s
    jobs.rows.pair_credit_s[i] += jobs.rows.pair_share[i] * since_s


@compiled
def _work(
    before: Jobs,
    jobs: Jobs,
    i: int,
    time_s: float,
    since_s: float,
    earns: bool,
    pair_credit_s: FloatArray,
) -> None:
    kind = jobs.rows.kind[i]
    jobs.rows.held_s[i] += since_s
    jobs.received_s[i, kind] += since_s
    if jobs.rows.partner[i] >= 0:
        jobs.rows.pair_credit_s[i] -= since_s
        # The earlier of two that share a device pays for both.
        if jobs.rows.number[i] < jobs.rows.partner[i]:
            other = row_of(before, jobs.rows.partner[i])
            if other >= 0:
                one, two = jobs.rows.profile[i], before.rows.profile[other]
                pair_credit_s[min(one, two), max(one, two), kind] -= since_s
    elif earns:
        jobs.credit_s[i, kind] -= since_s
    worked_s = time_s - max(jobs.rows.ready_s[i], time_s - since_s)
    if worked_s > 0.0:
        done = jobs.rows.done_steps[i] + jobs.rows.rate[i] * worked_s
        jobs.rows.done_steps[i] = min(done, jobs.rows.total_steps[i])


@compiled_entry("hocket.fleet.rounds.state")
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
