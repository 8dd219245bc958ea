"""Arrays that the compiled parts of a step work on: wishes, choices, devices and changes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import FloatArray

Counts = NDArray[np.int64]

UNITS_PER_ROUND = 16.0
"""Debts are compared in coarse units, so that noise of a solver decides nothing."""
HALF_ROUNDS = 300.0
"""Rounds that a job still needs where it may take half of the slack."""


class Pace(NamedTuple):
    """Rules by which debts are compared."""

    round_s: float
    stickiness_rounds: float
    slack_rounds: float
    patience_s: float
    min_run_s: float
    most_owed_s: float
    """Debts that could not be paid for long are not paid all at once."""
    only_waiting: bool
    """Whether running jobs keep what they have, and only the others wish."""


class Speeds(NamedTuple):
    """What the rate of a running job depends on, beside the job."""

    beside: FloatArray
    """``[profile, profile, kind]``; without rows where jobs do not share devices."""
    whole_s: float
    """Time in which only whole steps count, as in Gavel's rounds; 0 for no such time."""


class Deal(NamedTuple):
    """How devices are handed out."""

    time_s: float
    restart_s: float
    min_run_s: float
    """A job that was started so lately stays where it is,"""
    min_turn_s: float
    """and one that was started so lately does not give way to a larger debt."""
    is_final: bool
    """Whether a gang that finds no server leaves its devices idle, instead of being withdrawn."""
    keeps_running: bool
    """Whether only free devices are given; a round begins otherwise, with a checkpoint of all."""
    needs_share: bool
    """Whether a job without a share takes a place in the count and is then not started."""


class Wishes(NamedTuple):
    """What jobs and pairs want: ``job x kinds + kind``, then pairs."""

    order: Counts
    """Part by part; the most urgent of a part first, once it is sorted."""
    parts: Counts
    """``[part, 3]``: start, stop, and the kind that all want, -1 for any."""
    rank: Counts
    """``[wish]``: scratch; whether it is one, and of what sort."""
    keys: FloatArray
    """``[key, wish]``: by which they are sorted, the first key first."""
    scratch: Counts
    is_reserved: NDArray[np.bool_]
    """``[job]``: goes before all."""
    is_withdrawn: NDArray[np.bool_]
    """``[wish]``: of a gang that was tried and found no server with room."""
    pairs: Counts
    """``[pair, 3]``: profile, profile and kind."""
    queue: Counts
    """Jobs of each profile that want to share, the neediest first."""
    queue_at: Counts
    """``[profile, 2]``: its part of the queue."""


class Choice(NamedTuple):
    """Who is to run where."""

    kind: Counts
    """``[job]``: -1 for nobody."""
    partner: Counts
    """``[job]``: row of the job that shares the devices, -1 for none."""
    free: Counts
    """``[kind]``: devices that are not given yet."""


class Floor(NamedTuple):
    """Devices sorted by server, and scratch of the placement."""

    holders: Counts
    """``[device, 2]``: numbers of jobs (rows while devices are given), -1 for none."""
    order: Counts
    """Working devices, those of one server together."""
    server_ptr: Counts
    server_kind: Counts
    num_free: Counts
    """``[server]``."""


class Changes(NamedTuple):
    """What was stopped and started, as `Actions` has it."""

    stays: NDArray[np.bool_]
    is_placed: NDArray[np.bool_]
    """Of jobs that were given devices."""
    is_spread: NDArray[np.bool_]
    """Whether a job's devices are on several servers."""
    stopped: Counts
    """``[3, job]``: number, attempt, reason."""
    started: Counts
    """``[3, job]``: row (the number in the end), attempt, partner."""
    device_ptr: Counts
    device: Counts
    size: Counts
    """Of stopped and started jobs, and of the devices of these."""


def new_wishes(num_jobs: int, num_kinds: int, pairs: Counts, queue: Counts, at: Counts) -> Wishes:
    """Room for all wishes of some jobs and pairs."""
    size = num_jobs * num_kinds + len(pairs)
    return Wishes(
        order=np.empty(size, dtype=np.int64),
        parts=np.empty((2 * num_kinds, 3), dtype=np.int64),
        rank=np.empty(size, dtype=np.int64),
        keys=np.empty((3, size)),
        scratch=np.empty(size, dtype=np.int64),
        is_reserved=np.zeros(num_jobs, dtype=np.bool_),
        is_withdrawn=np.zeros(size, dtype=np.bool_),
        pairs=pairs,
        queue=queue,
        queue_at=at,
    )


def new_changes(num_jobs: int, num_devices: int) -> Changes:
    """Room for all that can change."""
    return Changes(
        stays=np.empty(num_jobs, dtype=np.bool_),
        is_placed=np.zeros(num_jobs, dtype=np.bool_),
        is_spread=np.empty(num_jobs, dtype=np.bool_),
        stopped=np.empty((3, num_jobs), dtype=np.int64),
        started=np.empty((3, num_jobs), dtype=np.int64),
        device_ptr=np.zeros(num_jobs + 1, dtype=np.int64),
        device=np.empty(2 * num_devices, dtype=np.int64),
        size=np.zeros(3, dtype=np.int64),
    )
