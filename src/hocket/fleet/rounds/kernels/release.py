"""Devices taken from jobs between rounds, and whether any that are free can be used. O(devices)."""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import LongArray
from hocket.fleet.rounds.kernels.rates import row_of, set_rate, speed_on
from hocket.fleet.rounds.state import RUNNING, WAITING, DeviceLayout, Jobs
from hocket.fleet.rounds.tables import Speeds
from hocket.kernels import kernel


@kernel
def take_away(
    jobs: Jobs, at: LongArray, phase: int, time_s: float, speeds: Speeds, holders: LongArray
) -> None:
    """Set the phase of jobs and free their devices; partners continue alone."""
    for one in range(at.shape[0]):
        i = at[one]
        partner = row_of(jobs, jobs.rows.partner[i])
        if partner >= 0:
            jobs.rows.partner[partner] = -1
            # Its steps since the last report were done beside the partner, so they are not used as
            # a measurement.
            jobs.rows.measured_s[partner] = np.inf
            set_rate(jobs, partner, -1, speeds)
        if jobs.rows.phase[i] == RUNNING:
            for device in range(holders.shape[0]):
                if holders[device, 0] == jobs.rows.number[i]:
                    holders[device, 0] = holders[device, 1]
                    holders[device, 1] = -1
                elif holders[device, 1] == jobs.rows.number[i]:
                    holders[device, 1] = -1
        jobs.rows.phase[i] = phase
        jobs.rows.device_type[i] = -1
        jobs.rows.partner[i] = -1
        jobs.rows.waiting_since_s[i] = time_s
        jobs.rows.reserved_s[i] = 0.0


@kernel
def has_waiting_job_that_fits(
    jobs: Jobs, holders: LongArray, layout: DeviceLayout, free: LongArray
) -> bool:
    """True if any waiting job fits on the free devices, whatever its quota; ``free`` is filled with
    their number by type."""
    for device_type in range(free.shape[0]):
        free[device_type] = layout.num_devices[device_type]
    for server in range(layout.server_type.shape[0]):
        for at in range(layout.server_ptr[server], layout.server_ptr[server + 1]):
            if holders[layout.order[at], 0] >= 0:
                free[layout.server_type[server]] -= 1
    for i in range(jobs.rows.shape[0]):
        if jobs.rows.phase[i] == WAITING:
            for device_type in range(free.shape[0]):
                can_run = speed_on(jobs, i, device_type, layout.largest_server) > 0.0
                if can_run and jobs.rows.gang[i] <= free[device_type]:
                    return True
    return False
