"""How many hosts would let a model fit that does not.

Found by asking the closed form of memory again for more hosts of the same kind, by doubling and
then halving the step.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.cost.parallel.memory import memory
from hocket.plan.limits import Limits
from hocket.plan.problem import Problem
from hocket.planners.parallelism.enumerate import division_blocks
from hocket.planners.parallelism.pools import Pool, pools_of
from hocket.transformer import ScheduleName

MOST_TIMES = 64
"""More hosts than so many times those that are there are no small change."""
HOLD_LEAST: tuple[ScheduleName, ...] = ("1f1b", "v-half")
"""Schedules of which one holds no more than any other."""


def hosts_needed(problem: Problem, limits: Limits) -> list[str]:
    """The fewest hosts that would do within the limits, in words; none where no few would."""
    pool = max(pools_of(problem), key=lambda pool: pool.num_devices * pool.memory_bytes)
    hosts = _fewest(problem, pool, _least(limits))
    if hosts is None:
        return []
    return [f"{hosts} hosts of {pool.per_host} {pool.kind.name} instead of {len(pool.hosts)}"]


def _fewest(problem: Problem, pool: Pool, limits: Limits) -> int | None:
    """The fewest hosts on which some division fits; None where those that are there would do."""
    low = len(pool.hosts)
    if _fits(problem, pool, low, limits):
        return None
    high = 2 * low
    while not _fits(problem, pool, high, limits):
        low, high = high, 2 * high
        if high > MOST_TIMES * len(pool.hosts):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(problem, pool, middle, limits) else (middle, high)
    return high


def _least(limits: Limits) -> Limits:
    """Of what is tried, that which holds least."""
    fixed = dict(limits.fixed)
    small = tuple(name for name in HOLD_LEAST if name in limits.schedules)
    return replace(
        limits,
        max_microbatch=fixed.get("microbatch", 1),
        schedules=limits.schedules if "chunks" in fixed or not small else small,
        recomputes=limits.recomputes[-1:],
    )


def _fits(problem: Problem, pool: Pool, num_hosts: int, limits: Limits) -> bool:
    """Whether some division fits on so many hosts."""
    more = Pool(pool.kind, (pool.hosts[0],) * num_hosts)
    training = problem.training
    for block in division_blocks(training.model, more, training.global_batch, limits):
        held = memory(training.model, block.divisions, training.software).total_bytes
        if np.any(held <= pool.limit_bytes):
            return True
    return False
