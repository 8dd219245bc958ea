"""Arrays that the compiled parts of a step work on: wishes, choices, devices and changes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray


class Pace(NamedTuple):
    """Rules by which debts are compared and devices handed out."""

    round_s: float
    stickiness_rounds: float
    slack_rounds: float
    patience_s: float
    max_deficit_s: float
    """Debts that could not be paid for long are not paid all at once."""
    restart_s: float
    keeps_line: bool
    """True if running jobs keep what they have in every round too."""
    backfills: bool
    """True if all jobs are reserved in order of arrival, and others fill gaps."""
    reserve_after_s: float
    """Wait after which devices are reserved for a gang that bound jobs keep from starting."""
    next_round_s: float
    """When jobs can be stopped that keep their devices until then."""
    keeps_equal: bool
    """True if a job stays on a kind that is as good to it as the one that it was given."""
    min_run_s: float
    """A job that was started so lately stays where it is,"""
    min_turn_s: float
    """and one that was started so lately does not give way to a larger debt."""
    keeps_running: bool
    """True if running jobs keep what they have, and only waiting ones get what is free; a round
    begins otherwise, with a checkpoint of all."""
    by_share: bool
    """Gavel's order instead of debts; a job without a share takes a place in the count there, and
    is then not started."""


class Speeds(NamedTuple):
    """What the rate of a running job depends on, beside the job."""

    beside: FloatArray
    """``[profile, profile, kind]``; without rows where jobs do not share devices."""
    whole_s: float
    """Time in which only whole steps count, as in Gavel's rounds; 0 for no such time."""


class Asked(NamedTuple):
    """What is asked for beside jobs alone, and in which order Gavel's rounds take kinds."""

    kinds: LongArray
    pairs: LongArray
    """``[pair, 3]``: profile, profile and kind."""
    urgency: FloatArray
    """``[pair]``: its deficit in rounds."""
    queue: LongArray
    """Jobs of each profile that want to share, the neediest first."""
    queue_at: LongArray
    """``[profile, 2]``: its part of the queue."""


NO_PAIRS = Asked(
    kinds=np.zeros(0, dtype=np.int64),
    pairs=np.zeros((0, 3), dtype=np.int64),
    urgency=np.zeros(0),
    queue=np.zeros(0, dtype=np.int64),
    queue_at=np.zeros((0, 2), dtype=np.int64),
)


class Wishes(NamedTuple):
    """Wishes of jobs and pairs: ``job x kinds + kind``, then pairs."""

    order: LongArray
    """Part by part; the most urgent of a part first, once it is sorted."""
    parts: LongArray
    """``[part, 3]``: start, stop, and the kind that all want, -1 for any."""
    rank: LongArray
    """``[wish]``: scratch; whether it is one, and of what sort."""
    keys: FloatArray
    """``[key, wish]``: by which they are sorted, the first key first."""
    carried: FloatArray
    """``[2, wish]``: scratch of sorting, and what follows too."""
    scratch: LongArray
    is_reserved: BoolArray
    """``[job]``: goes before all."""
    is_kept: BoolArray
    """``[job]``: runs where it is whatever the deficits of others."""
    is_withdrawn: BoolArray
    """``[wish]``: of a gang, or of two, that was tried and found no server with scratch."""
    pairs: LongArray
    """As in `Asked`, and what follows too."""
    queue: LongArray
    queue_at: LongArray
    """Its first column moves past those who have something already."""


class RoundChoice(NamedTuple):
    """Who is to run where."""

    kind: LongArray
    """``[job]``: -1 for nobody."""
    partner: LongArray
    """``[job]``: row of the job that shares the devices, -1 for none."""
    free: LongArray
    """``[kind]``: devices that are not given yet."""
    before: LongArray
    """``[job]``: the kind on which it runs, -1 for one that does not."""
    ends_s: FloatArray
    """``[job]``: when it gives back what it was granted now; minus infinity for whenever asked."""


class Floor(NamedTuple):
    """Devices sorted by server, and scratch of the placement."""

    holders: LongArray
    """``[device, 2]``: numbers of jobs (rows while devices are given), -1 for none."""
    order: LongArray
    """Working devices, those of one server together."""
    server_ptr: LongArray
    server_kind: LongArray
    num_free: LongArray
    """``[server]``."""
    first: LongArray
    """``[kind]``: no server of the kind before this one has scratch."""
    slots: LongArray
    """Scratch, a power of two: rows of jobs by the last bits of their numbers."""
    closed_s: FloatArray
    """``[server]``: when a reserved gang needs the whole of it; infinite for never."""


class StopsAndStarts(NamedTuple):
    """Stops and starts, as `Actions` has them."""

    stays: BoolArray
    is_placed: BoolArray
    """Of jobs that were given devices."""
    is_spread: BoolArray
    """True if a job's devices are on several servers."""
    stopped: LongArray
    """``[3, job]``: number, attempt, reason."""
    started: LongArray
    """``[3, job]``: row (the number in the end), attempt, partner."""
    device_ptr: LongArray
    device: LongArray
    size: LongArray
    """Of stopped and started jobs, and of the devices of these."""


class RoundScratch(NamedTuple):
    """All that a round writes to, in few arrays, because each costs time; `play` cuts them up."""

    by_job: LongArray
    """``[10, job + 1]``: kind and partner, then stopped (3), started (3) and where its devices
    begin, as in `StopsAndStarts`, and the kind before."""
    by_wish: LongArray
    """``[3, wish]``: order, rank and scratch."""
    keys: FloatArray
    """``[5, wish]``: keys by which they are sorted (3), and scratch of it."""
    marks: BoolArray
    """``[6, wish]``: reserved, withdrawn, stays, placed, spread, kept."""
    parts: LongArray
    few: LongArray
    """What is free and the first server (by kind), sizes of changes, room of servers."""
    bound: LongArray
    """``[kind]``: devices of running jobs that may not be stopped."""
    moments: FloatArray
    """``[job + server]``: ends of jobs, then when servers are needed by reserved gangs."""
    steps: FloatArray
    """``[2, kind, step]``: times and free devices of the timeline."""
    num_steps: LongArray
    queue_at: LongArray
    slots: LongArray
    device: LongArray
    holders: LongArray


def new_scratch(
    num_jobs: int, num_kinds: int, num_devices: int, num_servers: int, asked: Asked
) -> RoundScratch:
    """Room for all that some jobs and pairs may want and get."""
    num_wishes = num_jobs * num_kinds + len(asked.pairs)
    return RoundScratch(
        by_job=np.empty((10, num_jobs + 1), dtype=np.int64),
        by_wish=np.empty((3, num_wishes), dtype=np.int64),
        keys=np.empty((5, num_wishes)),
        marks=np.empty((6, num_wishes), dtype=np.bool_),
        parts=np.empty((2 * num_kinds, 3), dtype=np.int64),
        few=np.empty(2 * num_kinds + 3 + num_servers, dtype=np.int64),
        bound=np.empty(num_kinds, dtype=np.int64),
        moments=np.empty(num_jobs + num_servers),
        # A step where a job ends, and two for each that is granted or reserved something.
        steps=np.empty((2, num_kinds, num_devices + 2 * num_jobs + 2)),
        num_steps=np.empty(num_kinds + 1, dtype=np.int64),
        queue_at=np.empty(asked.queue_at.shape, dtype=np.int64),
        slots=np.empty(1 << (2 * num_jobs).bit_length(), dtype=np.int64),
        device=np.empty(2 * num_devices, dtype=np.int64),
        holders=np.empty((num_devices, 2), dtype=np.int64),
    )
