"""AlloX: the least average completion time of jobs of one device on mixed devices, as a matching.

Le et al., "AlloX", EuroSys 2020 (after Horn, 1973): a job that is q-th from the end on its device
delays q jobs, itself included, so jobs are matched with (device, q) at the least sum of
q x duration. Jobs that are last to be delayed on their device run now, and nobody who runs is
moved: only waiting jobs are matched, with the devices that are left; those that should have ended
long ago, with what the others leave. O(n^2 x places).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.base.errors import UsageError
from hocket.fleet.allocation import Allocation, Warm
from hocket.fleet.market import Market
from hocket.fleet.policies.normalise import known_remaining_steps
from hocket.fleet.policies.staying import staying_on

_NEVER_S = 1e15


def allox(market: Market, warm: Warm | None = None) -> Allocation:
    """The average completion time of what is here now is least; shares are 0 or 1."""
    remaining = known_remaining_steps(market, "allox")
    if np.any(market.gang > 1):
        raise UsageError(
            "policy 'allox' knows jobs of one device only", hint="choose makespan or las"
        )
    speed = market.usable_steps_per_s
    with np.errstate(divide="ignore"):
        duration = np.where(speed > 0.0, remaining[:, None] / speed, _NEVER_S)
    shares = np.zeros(speed.shape)
    stays_on = staying_on(market)
    stay = np.flatnonzero(stays_on >= 0)
    shares[stay, stays_on[stay]] = 1.0
    num_free = market.num_devices - np.bincount(stays_on[stay], minlength=market.num_kinds)
    can_start = (speed[:, num_free > 0] > 0.0).any(axis=1)
    waits = (stays_on < 0) & can_start
    total_s = 0.0
    for turn in (market.keeps_word, ~market.keeps_word):
        wait = np.flatnonzero(waits & turn)
        kind, place, ends_s = _match(duration[wait], num_free)
        runs = _first_on_each_device(kind, place, num_free)
        shares[wait[runs], kind[runs]] = 1.0
        num_free = num_free - np.bincount(kind[runs], minlength=market.num_kinds)
        total_s += ends_s
    jobs = np.concatenate([stay, np.flatnonzero(waits)])
    total_s += float(duration[stay, stays_on[stay]].sum() + market.elapsed_s[jobs].sum())
    objective = total_s / max(len(jobs), 1)
    return Allocation(
        policy="allox",
        shares=shares,
        objective=objective,
        bound=objective,
        notes={
            "objective": "average completion time in seconds, without later arrivals",
            "stay": str(len(stay)),
        },
    )


def _match(duration: FloatArray, num_devices: LongArray) -> tuple[LongArray, LongArray, float]:
    """The kind of each job, its place from the end there, and the summed completion time."""
    from scipy.optimize import linear_sum_assignment

    depth = 1 + 2 * -(-len(duration) // max(int(num_devices.sum()), 1))
    while True:
        # No more places of a kind than jobs: the first devices of a kind are as good as any.
        width = np.minimum(num_devices, len(duration))
        kind = np.repeat(np.arange(len(width)), width * depth)
        place = np.concatenate([np.repeat(np.arange(1, depth + 1), count) for count in width])
        row, column = linear_sum_assignment(duration[:, kind] * place[None, :])
        is_deepest = np.any(place[column] == depth)
        if not is_deepest or depth >= len(duration):
            total_s = float((duration[row, kind[column]] * place[column]).sum())
            return kind[column], place[column], total_s
        depth = min(2 * depth, len(duration))


def _first_on_each_device(kind: LongArray, place: LongArray, num_devices: LongArray) -> BoolArray:
    """Jobs that run now: the furthest from the end, as many as there are devices of the kind."""
    runs = np.zeros(len(kind), dtype=bool)
    for one in range(len(num_devices)):
        jobs = np.flatnonzero(kind == one)
        furthest = jobs[np.lexsort((jobs, -place[jobs]))]
        runs[furthest[: num_devices[one]]] = True
    return runs
