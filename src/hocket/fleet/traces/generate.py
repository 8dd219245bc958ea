"""Generate random traces: a Poisson process with the job mix of the OSDI 2020 evaluation.

Durations on the reference device are 10^u minutes, u uniform in [1.5, 3) four times out of five and
in [3, 4] otherwise; gangs of 1, 2, 4 and 8 in proportions 70, 10, 15 and 5 on request. Job types
are drawn evenly from a table. Same seed, same trace.
"""

from __future__ import annotations

import numpy as np

from hocket.base.errors import UsageError
from hocket.fleet.throughputs.table import Throughputs
from hocket.fleet.traces.trace import Trace

# Gang sizes and their probabilities, and the fraction of long jobs.
_GANGS = (1, 2, 4, 8)
_GANG_PARTS = (0.7, 0.1, 0.15, 0.05)
_LONG_PART = 0.2


def generate_trace(
    throughputs: Throughputs,
    *,
    num_jobs: int,
    jobs_per_hour: float,
    seed: int = 0,
    has_gangs: bool = False,
) -> Trace:
    """Draw jobs of the job types of a table; its first device type is the reference."""
    if num_jobs < 1 or not jobs_per_hour > 0.0:
        raise UsageError("a trace needs at least one job and a rate above 0")
    random = np.random.default_rng(seed)
    gang = random.choice(_GANGS, size=num_jobs, p=_GANG_PARTS)
    if not has_gangs:
        gang[:] = 1
    profile = np.zeros(num_jobs, dtype=np.int64)
    for size in np.unique(gang):
        fits = [
            row for row, known in enumerate(throughputs.profiles)
            if known.gang == size and throughputs.alone[row, 0] > 0.0
        ]  # fmt: skip
        if not fits:
            raise UsageError(f"the table has no jobs of {size} devices")
        at = np.flatnonzero(gang == size)
        profile[at] = random.choice(fits, size=len(at))
    is_long = random.random(num_jobs) < _LONG_PART
    exponent = np.where(is_long, random.uniform(3, 4, num_jobs), random.uniform(1.5, 3, num_jobs))
    duration_s = 60.0 * 10.0**exponent
    gaps_s = random.exponential(3600.0 / jobs_per_hour, num_jobs)
    return Trace(
        names=tuple(map(str, range(num_jobs))),
        job_types=tuple(throughputs.profiles[row].job_type for row in profile),
        arrival_s=np.cumsum(gaps_s) - gaps_s[0],
        gang=gang.astype(np.int64),
        weight=np.ones(num_jobs),
        total_steps=duration_s * throughputs.alone[profile, 0],
        duration_s=duration_s,
        slo_s=np.full(num_jobs, np.inf),
    )
