"""Settings and arrays that are passed to the compiled kernels of a round."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.fleet.rounds.state import DeviceLayout, Jobs


class RoundParameters(NamedTuple):
    """Settings of one round: how deficits are compared and devices handed out."""

    round_s: float
    stickiness_rounds: float
    slack_rounds: float
    patience_s: float
    max_deficit_s: float
    """Upper limit of a deficit, so that a job that got nothing for long does not take everything
    at once."""
    restart_s: float
    runs_in_arrival_order: bool
    """True if jobs run to their end in order of arrival (improved FIFO without sharing)."""
    backfills: bool
    """True if all jobs are reserved in order of arrival, and others fill gaps."""
    reserve_after_s: float
    """Wait after which devices are reserved for a gang that non-preemptible jobs keep from
    starting."""
    next_round_s: float
    """Time at which jobs can be stopped that keep their devices until then."""
    keeps_equal: bool
    """True if a job stays on a device type that is as good to it as the one that it was given."""
    min_turn_s: float
    """A gang that devices were collected for is not preempted before it has run so long."""
    is_refill: bool
    """True between rounds: only waiting jobs get what is free. At a round, all jobs that save are
    taken to have checkpointed now."""
    by_share: bool
    """True for Gavel's order instead of deficits; a job without a share takes a place in the count
    there, and is then not started."""


class Speeds(NamedTuple):
    """Tables that the rate of a running job depends on."""

    beside: FloatArray
    """``[profile, profile, type]``; without rows where jobs do not share devices."""
    whole_s: float
    """Time in which only whole steps count, as in Gavel's rounds; 0 for no such time."""


class Asked(NamedTuple):
    """Wishes of pairs, and the order of device types in Gavel's rounds."""

    device_types: LongArray
    pairs: LongArray
    """``[pair, 3]``: profile, profile and device type."""
    urgency: FloatArray
    """``[pair]``: its deficit in rounds."""
    queue: LongArray
    """Jobs of each profile that want to share, the neediest first."""
    queue_at: LongArray
    """``[profile, 2]``: its part of the queue."""


NO_PAIRS = Asked(
    device_types=np.zeros(0, dtype=np.int64),
    pairs=np.zeros((0, 3), dtype=np.int64),
    urgency=np.zeros(0),
    queue=np.zeros(0, dtype=np.int64),
    queue_at=np.zeros((0, 2), dtype=np.int64),
)


class Round(NamedTuple):
    """Arrays that a round reads and writes; allocated for each round."""

    time_s: float
    jobs: Jobs
    """Counted up to now, and written to."""
    asked: Asked
    parameters: RoundParameters
    speeds: Speeds
    layout: DeviceLayout
    held: LongArray
    """``[device, 2]``: rows of the jobs on it before the round, -1 for none."""
    holders: LongArray
    """The same while devices are given; numbers of the jobs in the end."""
    order: LongArray
    """Wishes of jobs and pairs, ``job x types + type``, then pairs. Part by part; the most urgent
    of a part first, once it is sorted."""
    parts: LongArray
    """``[part, 3]``: start, stop, and the type that all want, -1 for any."""
    rank: LongArray
    """``[wish]``: whether it is one, and whether it has a deficit or only fills free devices."""
    keys: FloatArray
    """``[key, wish]``: by which they are sorted, the first key first."""
    sort_keys: FloatArray
    """``[2, wish]``: scratch of sorting, as ``scratch``."""
    scratch: LongArray
    is_withdrawn: BoolArray
    """``[wish]``: of a gang, or of a pair, that was tried and fitted on no server."""
    queue_at: LongArray
    """As in `Asked`; its first column moves past those who have something already."""
    goes_first: BoolArray
    """``[job]``, as those that follow: its deficit is too large, or its gang waits too long."""
    is_kept: BoolArray
    """Runs where it is whatever the deficits of others."""
    stays: BoolArray
    """Keeps its devices in this round."""
    is_placed: BoolArray
    """Was given devices."""
    is_spread: BoolArray
    """Its devices are on several servers."""
    device_type: LongArray
    """Type of device that it is to run on, -1 for none."""
    partner: LongArray
    """Row of the job that shares the devices, -1 for none."""
    before: LongArray
    """The type on which it runs, -1 for one that does not."""
    ends_s: FloatArray
    """Time at which it gives back what it was granted now; minus infinity if it can be stopped."""
    free: LongArray
    """``[type]``: devices that are not given yet."""
    first: LongArray
    """``[type]``: servers of the type before this one are full."""
    stoppable: LongArray
    """``[type]``: devices that are free, or held by jobs that may be stopped."""
    stoppable_together: LongArray
    """``[type]``: the same on the server that has most of them."""
    segment_s: FloatArray
    """``[type, segment]``: when the number of free devices changes."""
    segment_free: FloatArray
    """``[type, segment]``: free devices from then on."""
    num_segments: LongArray
    """``[type]``: segments of its timeline of free devices."""
    has_timeline: BoolArray
    """``[1]``: True if the timelines are in use, as some job goes first among bound jobs."""
    num_free: LongArray
    """``[server]``: devices that nobody holds."""
    server_needed_s: FloatArray
    """``[server]``: when a reserved gang needs the whole of it; infinite for never."""
    stopped: LongArray
    """``[3, job]``: number, attempt, reason."""
    started: LongArray
    """``[3, job]``: row (the number in the end), attempt, partner."""
    device_ptr: LongArray
    device: LongArray
    """Devices of started jobs, as `Actions` has them."""
    sizes: LongArray
    """Of stopped and started jobs, and of the devices of these."""


def new_round(
    time_s: float,
    jobs: Jobs,
    asked: Asked,
    parameters: RoundParameters,
    speeds: Speeds,
    layout: DeviceLayout,
    held: LongArray,
) -> Round:
    """Allocate the arrays of a round."""
    (num_jobs, num_types), num_devices = jobs.shares.shape, len(held)
    num_wishes, num_servers = num_jobs * num_types + len(asked.pairs), len(layout.server_type)
    # One segment for each device that is released, two for each job that gets or reserves some.
    num_segments = num_devices + 2 * num_jobs + 2

    def whole(*shape: int) -> LongArray:
        return np.empty(shape, dtype=np.int64)

    def marks(size: int) -> BoolArray:
        return np.zeros(size, dtype=np.bool_)

    return Round(
        time_s=time_s,
        jobs=jobs,
        asked=asked,
        parameters=parameters,
        speeds=speeds,
        layout=layout,
        held=held,
        holders=whole(num_devices, 2),
        order=whole(num_wishes),
        parts=whole(2 * num_types, 3),
        rank=whole(num_wishes),
        keys=np.zeros((3, num_wishes)),
        sort_keys=np.empty((2, num_wishes)),
        scratch=whole(num_wishes),
        is_withdrawn=marks(num_wishes),
        queue_at=whole(*asked.queue_at.shape),
        goes_first=marks(num_jobs),
        is_kept=marks(num_jobs),
        stays=marks(num_jobs),
        is_placed=marks(num_jobs),
        is_spread=marks(num_jobs),
        device_type=whole(num_jobs),
        partner=whole(num_jobs),
        before=whole(num_jobs),
        ends_s=np.empty(num_jobs),
        free=whole(num_types),
        first=whole(num_types),
        stoppable=whole(num_types),
        stoppable_together=whole(num_types),
        segment_s=np.empty((num_types, num_segments)),
        segment_free=np.empty((num_types, num_segments)),
        num_segments=whole(num_types),
        has_timeline=marks(1),
        num_free=whole(num_servers),
        server_needed_s=np.empty(num_servers),
        stopped=whole(3, num_jobs),
        started=whole(3, num_jobs),
        device_ptr=np.zeros(num_jobs + 1, dtype=np.int64),
        device=whole(2 * num_devices),
        sizes=whole(3),
    )
