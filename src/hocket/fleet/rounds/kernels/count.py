"""Count work, time and deficits up to a moment. O(jobs)."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.fleet.rounds.kernels.rates import row_of
from hocket.fleet.rounds.state import ENDED, RUNNING, Jobs
from hocket.kernels import kernel


@kernel
def count(
    jobs: Jobs,
    time_s: float,
    earns: bool,
    pair_credit_s: FloatArray,
    pair_amount: FloatArray,
) -> None:
    """Add work, held time, deficits and credits of all jobs up to a moment."""
    passed_s = 0.0
    # One loop without calls per job: calls would pass all arrays of the tuple one by one.
    for i in range(jobs.rows.shape[0]):
        since_s, phase = time_s - jobs.rows.counted_s[i], jobs.rows.phase[i]
        # Ended jobs keep their figures until the next round.
        if since_s <= 0.0 or phase == ENDED:
            continue
        passed_s = max(passed_s, since_s)
        jobs.rows.counted_s[i] = time_s
        if phase == RUNNING:
            device_type = jobs.rows.device_type[i]
            jobs.rows.held_s[i] += since_s
            jobs.received_s[i, device_type] += since_s
            if jobs.rows.partner[i] >= 0:
                jobs.rows.pair_credit_s[i] -= since_s
                _pay_for_pair(jobs, i, since_s, pair_credit_s)
            elif earns:
                jobs.credit_s[i, device_type] -= since_s
            worked_s = time_s - max(jobs.rows.ready_s[i], time_s - since_s)
            if worked_s > 0.0:
                done = jobs.rows.done_steps[i] + jobs.rows.rate[i] * worked_s
                jobs.rows.done_steps[i] = min(done, jobs.rows.total_steps[i])
        if phase <= RUNNING:
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


@kernel
def _pay_for_pair(jobs: Jobs, i: int, since_s: float, pair_credit_s: FloatArray) -> None:
    """Charge the pair once for a shared device, when its earlier job is counted."""
    if jobs.rows.number[i] < jobs.rows.partner[i]:
        other = row_of(jobs, jobs.rows.partner[i])
        if other >= 0:
            one, two = jobs.rows.profile[i], jobs.rows.profile[other]
            pair_credit_s[min(one, two), max(one, two), jobs.rows.device_type[i]] -= since_s


@kernel
def first_to_finish(jobs: Jobs) -> tuple[float, int]:
    """Moment at which the next running job ends, and its row; infinite and -1 if none ends."""
    first_s, row = np.inf, -1
    for i in range(jobs.rows.shape[0]):
        if jobs.rows.phase[i] == RUNNING and jobs.rows.rate[i] > 0.0:
            left = jobs.rows.total_steps[i] - jobs.rows.done_steps[i]
            end_s = max(jobs.rows.counted_s[i], jobs.rows.ready_s[i]) + left / jobs.rows.rate[i]
            if end_s < first_s:
                first_s, row = end_s, i
    return first_s, row
