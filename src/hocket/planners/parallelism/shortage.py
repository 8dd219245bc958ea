"""The smallest change that would let a model fit: more hosts, or devices with more memory.

Both are found by asking the closed form of memory again: more hosts of the same kind by doubling
and then halving the step, more memory by what the smallest division holds.
"""

from __future__ import annotations

import numpy as np

from hocket.cost.parallel.memory import memory
from hocket.planners.parallelism.candidates import ParallelCandidate, Training
from hocket.planners.parallelism.enumerate import Limits, division_blocks
from hocket.planners.parallelism.pools import Pool
from hocket.units import format_bytes

MOST_TIMES = 64
"""More hosts than so many times those that are there are no small change."""


def smallest_change(training: Training, least: ParallelCandidate) -> list[str]:
    """What would do, in words: one entry, or none where nothing in reach would."""
    needed = least.peak_bytes[least.fullest_rank]
    ways = [f"devices with {format_bytes(needed)}"] if needed else []
    pool = max(training.pools, key=lambda pool: pool.num_devices * pool.memory_bytes)
    hosts = _hosts_needed(training, pool)
    if hosts is not None:
        ways.append(
            f"{hosts} hosts of {pool.per_host} {pool.kind.name} instead of {len(pool.hosts)}"
        )
    return [f"it would fit on {' or '.join(ways)}"] if ways else []


def _hosts_needed(training: Training, pool: Pool) -> int | None:
    """The fewest hosts on which some division fits."""
    low = high = len(pool.hosts)
    while not _fits(training, pool, high):
        low, high = high, 2 * high
        if high > MOST_TIMES * len(pool.hosts):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _fits(training, pool, middle) else (middle, high)
    return high


def _fits(training: Training, pool: Pool, num_hosts: int) -> bool:
    """Whether the divisions that hold least fit on so many hosts."""
    more = Pool(pool.kind, (pool.hosts[0],) * num_hosts)
    limits = Limits(
        max_tensor=pool.per_host, max_microbatch=1, schedules=("1f1b", "v-half"),
        recomputes=("full",),
    )  # fmt: skip
    for block in division_blocks(training.model, more, training.global_batch, limits):
        held = memory(training.model, block.divisions, training.software).total_bytes
        if np.any(held <= pool.memory_bytes):
            return True
    return False
