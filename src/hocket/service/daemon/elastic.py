"""Elastic jobs of a running fleet: choice of the gang size at the start and at each round.

A job with plans for several numbers of devices is stopped and restarted with another number if the
gain is worth it. It then gets the plan for its new number of devices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hocket.fleet.gangs import GangSpeeds
from hocket.fleet.rounds.events import Resize
from hocket.fleet.rounds.sizes import Sizes, is_unsettled
from hocket.fleet.rounds.state import FleetState
from hocket.service.records import JobRecord
from hocket.service.spec import JobSpec, on_gang


def speed_on(spec: JobSpec, device_type: str, gang: int | None = None) -> float:
    """Steps per second of a gang on a device type; 0 if the job must not run there."""
    if spec.throughputs is None:
        return 1.0
    return spec.throughputs.get(on_gang(spec, gang or spec.gang, device_type), 0.0)


def gang_speeds(state: FleetState, spec: JobSpec, owner: str) -> GangSpeeds:
    """Throughputs of a job for every number of devices that it and its quotas allow."""
    names, gangs = state.device_types, tuple(sorted(set(spec.gangs or (spec.gang,))))
    users = dict(zip(state.users, state.user_quota[:, 0], strict=False))
    teams = dict(zip(state.teams, state.team_quota[:, 0], strict=False))
    most = min(users.get(owner, math.inf), teams.get(spec.team, math.inf))
    # A job that no size fits waits with its smallest gang.
    gangs = tuple(gang for gang in gangs if gang <= most) or gangs[:1]
    table = np.array(
        [[speed_on(spec, device_type, gang) for device_type in names] for gang in gangs]
    )
    return GangSpeeds(gangs=gangs, steps_per_s=table)


def first_gang(
    state: FleetState, jobs: Mapping[int, JobRecord], number: int, spec: JobSpec, owner: str
) -> int:
    """Number of devices that a new job starts with, given the jobs that are already there."""
    if spec.gangs is None:
        return spec.gang
    speeds = {**_elastic(state, jobs), number: gang_speeds(state, spec, owner)}
    total_steps = float("inf") if spec.total_steps is None else spec.total_steps
    return Sizes(speeds).begin(state, number, total_steps).gang


def resized(state: FleetState, jobs: Mapping[int, JobRecord], time_s: float) -> Resize | None:
    """Resize event of this round; None if no job changes its size."""
    speeds = _elastic(state, jobs) if is_unsettled(state) else {}
    return Sizes(speeds).resize(state, time_s) if speeds else None


def _elastic(state: FleetState, jobs: Mapping[int, JobRecord]) -> dict[int, GangSpeeds]:
    return {
        number: gang_speeds(state, record.spec, record.owner)
        for number, record in jobs.items()
        if record.spec.gangs is not None
    }
