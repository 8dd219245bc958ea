"""The sums that a simulation keeps after every step, compiled. O(devices + starts)."""

from __future__ import annotations

from hocket.base.arrays import LongArray
from hocket.fleet.simulator.record import RunTotals
from hocket.kernels import kernel

_MOVED = 1


@kernel
def tally(
    time_s: float,
    passed_s: float,
    num_devices: LongArray,
    totals: RunTotals,
    holders: LongArray,
    device_kind: LongArray,
    started: LongArray,
    started_attempt: LongArray,
    stopped_reason: LongArray,
) -> None:
    """Take in a step that came ``passed_s`` after the last."""
    for kind in range(totals.busy.shape[0]):
        totals.busy_device_s[kind] += passed_s * totals.busy[kind]
        totals.up_device_s[kind] += passed_s * num_devices[kind]
    if started.shape[0] == 0 and stopped_reason.shape[0] == 0:
        return
    totals.busy[:] = 0.0
    for device in range(holders.shape[0]):
        if holders[device, 0] >= 0:
            totals.busy[device_kind[device]] += 1.0
    totals.num_started[0] += started.shape[0]
    for at in range(started.shape[0]):
        if started_attempt[at] == 1:
            totals.start_s[started[at]] = time_s
    for at in range(stopped_reason.shape[0]):
        totals.num_preempted[0] += stopped_reason[at] <= _MOVED
