"""The state of a fleet: devices, jobs, and the deficit and devices of each job.

Jobs are stored in arrays, one row each in order of their numbers, so that even a large state is
copied in microseconds. A step copies the arrays that it changes and keeps those of the old state.
By convention nothing writes to the arrays of a state. Ended jobs are removed when the next round
begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, LongArray
from hocket.base.errors import UsageError, unknown_name
from hocket.fleet.allocation import Warm

Rows = Any
"""An array of `JOB_ROW`; compiled code reads its fields as attributes, which numpy's types
do not know."""

_NONE = np.zeros(0, dtype=np.int64)

WAITING, RUNNING, PAUSED, ENDED, BLOCKED = range(5)
"""Phases of a job. A blocked job waits for other jobs, a waiting job for devices."""
UNDECIDED = -1
"""Value of the column ``preemptible`` if unknown, beside 0 and 1."""
NOT_SOLVED, MAY_FILL, SHARE_ONLY = range(3)
"""Values of the column ``has_share``: the job came after the last allocation; it may use free
devices beyond its share; it uses devices only where it has a share."""
PHASES = ("waiting", "running", "paused", "ended", "blocked")
CONDITIONS = ("ok", "any", "failed")
"""Conditions on the end of a job that another job waits for."""
MECHANISMS = ("improved", "gavel")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of the rounds."""

    policy: str = "las"
    mechanism: str = "improved"
    round_s: float = 360.0
    min_reset_s: float = 1920.0
    """Gavel's mechanism: minimum time between two allocations."""
    min_solve_s: float = 0.0
    """Improved mechanism: minimum time between two allocations; 0 for one at every change."""
    slack_rounds: float = 150.0
    """Maximum number of rounds that a job may be delayed by jobs that end sooner; 0 for strict
    fairness.
    """
    patience_rounds: float = 200.0
    """Deficit in rounds above which a job goes first and devices are reserved for it."""
    reserve_after_s: float | None = None
    """Waiting time after which devices are reserved for a gang that cannot start because
    non-preemptible jobs hold them. None for two rounds or the median length of the jobs, whichever
    is larger.
    """
    stickiness_rounds: float = 4.0
    """Rounds by which the deficit of a waiting job must exceed that of a running one to take its
    devices.
    """
    restart_s: float = 0.0
    """Time from the start of a job to its first step: what a preemption costs."""
    max_failures: int = 5
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class FleetDevice:
    """One device; devices of one server are joined by faster links."""

    name: str
    device_type: str
    server: str = ""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job as it is submitted."""

    number: int
    name: str
    steps_per_s: tuple[float, ...]
    """Steps per second of the whole gang on each device type of the state; 0 if it cannot run
    there.
    """
    total_steps: float = float("inf")
    gang: int = 1
    weight: float = 1.0
    deadline_s: float = float("inf")
    """A point in time, not a duration."""
    team: int = 0
    profile: int = -1
    """Row of the pair table; -1 for a job that shares devices with nobody."""
    spread_steps_per_s: tuple[float, ...] | None = None
    """The same for a gang that is spread over several servers; 0 if it cannot be spread, None if it
    is as fast as on one server.
    """
    preemptible: bool | None = True
    """True if the job saves its work when it is stopped. Otherwise it keeps its devices from start
    to end and shares them with no other job. None if unknown; it then counts as False until it
    shows that it saves.
    """
    user: int = 0
    """Index into the state's users."""
    priority: int = 0
    """Level of its priority class: higher levels get devices first."""
    time_limit_s: float = float("inf")
    """Time that it may hold devices, over all attempts."""
    max_failures: int = 0
    """Failures after which it is given up; 0 for the limit of the rules."""
    after: tuple[tuple[int, str], ...] = ()
    """Jobs of the state that must end first, each with one of `CONDITIONS`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PairTable:
    """Steps per second of one profile beside another: ``[a, b, type]``, 0 where forbidden."""

    steps_per_s: FloatArray


@dataclass(frozen=True, eq=False, kw_only=True)
class PairPlan:
    """Time that pairs of profiles are to spend on a device, and their deficits."""

    amount: FloatArray
    """``[a, b, type]``, a no larger than b."""
    credit_s: FloatArray


@dataclass(frozen=True, eq=False, kw_only=True)
class PairEstimates:
    """Speeds of jobs that may share devices, by profile; `PairTable` is computed from them."""

    profiles: tuple[str, ...]
    """Names, in the order of the rows."""
    alone: FloatArray
    """``[profile, type]``: steps per second without company."""
    part: FloatArray
    """``[a, b, type]``: the part of it that a keeps beside b; 0 where they may not share."""
    is_measured: BoolArray
    """``[a, b, type]``: true once the two have run together; else it is an estimate."""


# Integer columns of the table of jobs.
_WHOLE = (
    "number", "gang", "team", "profile", "phase", "device_type", "partner", "attempt", "failures",
    "has_share", "is_spread", "preemptible", "losses", "user", "priority", "max_failures",
    "over_quota",
)  # fmt: skip
# Floating-point columns of the table of jobs; times are in seconds.
_REAL = (
    "weight", "total_steps", "submitted_s", "deadline_s", "done_steps", "saved_steps", "counted_s",
    "ready_s", "started_s", "waiting_since_s", "rate", "isolated_s", "isolated_rate", "target_s",
    "held_s", "pair_share", "pair_credit_s", "measured_s", "measured_steps", "isolated_steps",
    "time_limit_s", "reserved_s", "own_weight", "group_shift",
)  # fmt: skip
JOB_ROW = np.dtype([(name, np.int64) for name in _WHOLE] + [(name, np.float64) for name in _REAL])
"""A row of the table of jobs. Besides the values of `Job`:

- ``phase``, ``device_type``, ``partner``: what it does now; a partner is the number of a job.
- ``attempt``, ``failures``, ``losses``: starts, failed attempts, and stops that lost work.
- ``has_share``: `NOT_SOLVED`, `MAY_FILL` or `SHARE_ONLY`.
- ``is_spread``: its devices are on several servers.
- ``over_quota``: the quota that keeps it from starting, 0 for none.
- ``own_weight``, ``weight``: as submitted, and as the policy sees it.
- ``counted_s``: moment up to which this row is counted.
- ``started_s``, ``ready_s``, ``waiting_since_s``: start of the present attempt, its first step, and
  the last submission, stop or resumption.
- ``done_steps``, ``saved_steps``, ``rate``: steps done and saved, and steps per second now.
- ``measured_s``, ``measured_steps``: last report, or start of the attempt.
- ``held_s``, ``target_s``: device time that it had, and that its shares promised so far.
- ``isolated_s``: time that its work would have taken with an equal part of the fleet, of which
  ``isolated_steps`` are counted, the next ones at ``isolated_rate``.
- ``pair_share``, ``pair_credit_s``: share of its time beside partners, and the deficit of that.
- ``reserved_s``: predicted start of a job with reserved devices; 0 for none, infinite if unknown.
- ``group_shift``: rounds added to the urgency, for the deficit of the job's group.
"""
# Opaque type of the size of a record, so that numpy copies rows in one piece.
_BYTES = np.dtype(f"V{JOB_ROW.itemsize}")


class Jobs(NamedTuple):
    """Jobs in rows, in order of their numbers."""

    rows: Rows
    """One `JOB_ROW` per job."""
    steps_per_s: FloatArray
    """``[job, type]``, as all that follow."""
    spread_steps_per_s: FloatArray
    """The same where the gang is spread over several servers."""
    shares: FloatArray
    """Part of its time that a job shall spend alone on a device type."""
    received_s: FloatArray
    """Time on a device type (Gavel's mechanism: since the last allocation)."""
    credit_s: FloatArray
    """Deficit of a job on a device type."""


def empty_rows(count: int, num_types: int) -> Jobs:
    """Uninitialised rows."""
    shape, empty = (count, num_types), np.empty
    rows = empty(count, dtype=JOB_ROW)
    return Jobs(rows, empty(shape), empty(shape), empty(shape), empty(shape), empty(shape))


def some_rows(rows: Rows, which: LongArray) -> Rows:
    """Rows of some jobs. They are copied as bytes, because numpy copies records field by field."""
    return rows.view(_BYTES)[which].view(JOB_ROW)


def joined_rows(rows: Rows, more: Rows) -> Rows:
    """Concatenate rows as bytes, for the same reason."""
    return np.concatenate([rows.view(_BYTES), more.view(_BYTES)]).view(JOB_ROW)


class DeviceLayout(NamedTuple):
    """Working devices, those of one server together."""

    order: LongArray
    server_ptr: LongArray
    server_type: LongArray
    num_devices: LongArray
    """Of each device type."""
    largest_server: LongArray
    """Number of devices of the largest server of each device type."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FleetState:
    """A fleet at one moment; immutable by convention."""

    rules: Rules
    device_types: tuple[str, ...]
    price_per_hour: FloatArray
    time_s: float
    next_tick_s: float
    """Start of the next round; infinite if nobody waits for one."""
    round_number: int
    solved_s: float
    """Time of the last allocation; minus infinity for never."""
    is_dirty: bool
    """True if jobs or devices changed since."""
    jobs: Jobs
    names: dict[int, str]
    """Names of the jobs by number."""
    device_names: tuple[str, ...]
    type_of_device: LongArray
    device_server: LongArray
    is_up: BoolArray
    holders: LongArray
    """``[device, 2]``: numbers of the jobs on each device, -1 for none; the second is used only if
    jobs share it.
    """
    layout: DeviceLayout
    warm: Warm | None = None
    pair_table: PairTable | None = None
    pair_plan: PairPlan | None = None
    pair_estimates: PairEstimates | None = None
    """Present if the table of pairs is learnt from jobs that run."""
    teams: tuple[str, ...] = ("",)
    team_weight: FloatArray = field(default_factory=lambda: np.ones(1))
    users: tuple[str, ...] = ("",)
    user_weight: FloatArray = field(default_factory=lambda: np.ones(1))
    user_quota: FloatArray = field(default_factory=lambda: np.full((0, 2), np.inf))
    """``[user, 2]``: devices at once and device seconds per week; infinite for no limit."""
    team_quota: FloatArray = field(default_factory=lambda: np.full((0, 2), np.inf))
    user_used_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    """Device seconds of each user in this week, counted where there are quotas."""
    team_used_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    usage_week: int = 0
    dependencies: LongArray = field(default_factory=lambda: np.zeros((0, 3), dtype=np.int64))
    """``[edge, 3]``: a job, the job that must end before it, and the index of the condition."""
    drained: tuple[str, ...] = ()
    """Devices that take no new jobs, including ones that are not there now."""
    servers: tuple[tuple[int, str], ...] = ()
    """Device type and name of each server, by its number in ``device_server``."""
    notes: dict[str, str] = field(default_factory=dict)
    """Notes of the last answer of the policy."""

    @property
    def num_types(self) -> int:
        """Number of device types."""
        return len(self.device_types)

    @property
    def num_devices(self) -> LongArray:
        """Working devices of each type."""
        return self.layout.num_devices.copy()

    @property
    def num_profiles(self) -> int:
        """Rows of the pair table without the last, which stands for jobs that share with nobody."""
        return 0 if self.pair_table is None else len(self.pair_table.steps_per_s) - 1

    def but(self, **changes: Any) -> FleetState:
        """Copy with some fields changed; several times as fast as `dataclasses.replace`."""
        state = object.__new__(FleetState)
        state.__dict__.update(self.__dict__, **changes)
        return state

    def row_of(self, number: int) -> int:
        """The row of a job that has not ended; raises `UsageError` where there is none."""
        numbers = self.jobs.rows["number"]
        row = int(numbers.searchsorted(number))
        if row >= len(numbers) or numbers[row] != number:
            raise UsageError(f"there is no job {number}", hint="it may have ended")
        if self.jobs.rows["phase"][row] == ENDED:
            raise UsageError(f"job {number} has ended")
        return row

    def devices_of(self, number: int) -> tuple[str, ...]:
        """The devices that a job holds."""
        held = np.flatnonzero((self.holders == number).any(axis=1))
        return tuple(self.device_names[device] for device in held)


BLANK = {
    **dict.fromkeys(JOB_ROW.names or (), 0),
    "device_type": -1,
    "partner": -1,
    "preemptible": 1,
    "time_limit_s": np.inf,
}
"""Row of a job about which nothing is known."""


def write_new_jobs(jobs: Jobs, first: int, fresh: tuple[Job, ...], time_s: float) -> None:
    """Fill the rows from ``first`` on with newly submitted jobs."""
    for at, job in enumerate(fresh, start=first):
        values = {
            **BLANK,
            "number": job.number,
            "gang": job.gang,
            "team": job.team,
            "profile": job.profile if job.preemptible else -1,
            "preemptible": UNDECIDED if job.preemptible is None else job.preemptible,
            "user": job.user,
            "priority": job.priority,
            "max_failures": job.max_failures,
            "phase": BLOCKED if job.after else WAITING,
            "time_limit_s": job.time_limit_s,
            "weight": job.weight,
            "own_weight": job.weight,
            "total_steps": job.total_steps,
            "deadline_s": job.deadline_s,
            "submitted_s": time_s,
            "counted_s": time_s,
            "waiting_since_s": time_s,
        }
        jobs.rows[at] = tuple(values.values())
        jobs.steps_per_s[at] = job.steps_per_s
        jobs.spread_steps_per_s[at] = job.spread_steps_per_s or job.steps_per_s
    for column in (jobs.shares, jobs.received_s, jobs.credit_s):
        column[first:] = 0.0


def new_state(
    device_types: tuple[str, ...],
    devices: tuple[FleetDevice, ...],
    rules: Rules | None = None,
    *,
    price_per_hour: FloatArray | None = None,
    pair_table: PairTable | None = None,
    time_s: float = 0.0,
) -> FleetState:
    """A fleet without jobs."""
    rules = rules or Rules()
    if not device_types:
        raise UsageError("a fleet needs at least one device type")
    _refuse_wrong_rules(rules)
    if pair_table is not None and rules.mechanism == "gavel":
        hint = "use the improved mechanism"
        raise UsageError("Gavel's mechanism does not share devices here", hint=hint)
    plan = None
    if pair_table is not None:
        # One more profile, for jobs that share with no other job.
        steps_per_s = np.pad(pair_table.steps_per_s, ((0, 1), (0, 1), (0, 0)))
        pair_table = PairTable(steps_per_s=steps_per_s)
        plan = PairPlan(amount=np.zeros(steps_per_s.shape), credit_s=np.zeros(steps_per_s.shape))
    state = FleetState(
        rules=rules,
        device_types=device_types,
        price_per_hour=np.ones(len(device_types)) if price_per_hour is None else price_per_hour,
        time_s=time_s,
        next_tick_s=np.inf,
        round_number=0,
        solved_s=-np.inf,
        is_dirty=False,
        jobs=empty_rows(0, len(device_types)),
        names={},
        device_names=(),
        type_of_device=_NONE,
        device_server=_NONE,
        is_up=np.zeros(0, dtype=bool),
        holders=np.zeros((0, 2), dtype=np.int64),
        pair_table=pair_table,
        pair_plan=plan,
        layout=lay_out(_NONE, _NONE, np.zeros(0, dtype=bool), len(device_types)),
    )
    return with_devices(state, devices)


def _refuse_wrong_rules(rules: Rules) -> None:
    if rules.mechanism not in MECHANISMS:
        raise unknown_name("mechanism", rules.mechanism, MECHANISMS)
    if not 0.0 < rules.round_s < np.inf:
        raise UsageError(f"a round cannot take {rules.round_s} s")
    for rule in fields(rules):
        value = getattr(rules, rule.name)
        if rule.type == "float" and not value >= 0.0:
            raise UsageError(f"{rule.name} cannot be {value}", hint="give a number from 0 on")
    if rules.reserve_after_s is not None and not rules.reserve_after_s >= 0.0:
        raise UsageError(f"reserve_after_s cannot be {rules.reserve_after_s}")


def with_devices(state: FleetState, devices: tuple[FleetDevice, ...]) -> FleetState:
    """Add devices; a device with a known name works again, at its present server."""
    for device in devices:
        if device.device_type not in state.device_types:
            raise UsageError(f"device {device.name!r} is of an unknown type {device.device_type!r}")
    if len({device.name for device in devices}) != len(devices):
        raise UsageError("two devices have one name")
    known = {name: index for index, name in enumerate(state.device_names)}
    fresh = tuple(device.name for device in devices if device.name not in known)
    known.update((name, len(known)) for name in fresh)
    device_type = np.append(state.type_of_device, np.zeros(len(fresh), dtype=np.int64))
    server = np.append(state.device_server, np.zeros(len(fresh), dtype=np.int64))
    is_up = np.append(state.is_up, np.zeros(len(fresh), dtype=bool))
    servers = {server: index for index, server in enumerate(state.servers)}
    for device in devices:
        at, its_type = known[device.name], state.device_types.index(device.device_type)
        if is_up[at] and device_type[at] != its_type:
            raise UsageError(
                f"device {device.name!r} is there as {state.device_types[device_type[at]]!r}"
            )
        key = (its_type, device.server or device.name)
        if is_up[at] and servers.get(key) != server[at]:
            raise UsageError(
                f"device {device.name!r} works on another server than {key[1]!r}",
                hint="remove the device before it is added elsewhere",
            )
        if not is_up[at]:
            device_type[at], server[at], is_up[at] = (
                its_type,
                servers.setdefault(key, len(servers)),
                True,
            )
    names = (*state.device_names, *fresh)
    return state.but(
        device_names=names,
        type_of_device=device_type,
        device_server=server,
        servers=tuple(servers),
        is_up=is_up,
        holders=np.concatenate([state.holders, np.full((len(fresh), 2), -1)]),
        layout=lay_out(device_type, server, is_up & ~_are(names, state.drained), state.num_types),
        is_dirty=True,
    )


def is_usable(state: FleetState) -> BoolArray:
    """``[device]``: works and is not drained."""
    return np.asarray(state.is_up & ~_are(state.device_names, state.drained))


def _are(names: tuple[str, ...], among: tuple[str, ...]) -> BoolArray:
    """``[name]``: is one of ``among``."""
    if not among:
        return np.zeros(len(names), dtype=bool)
    found = set(among)
    return np.array([name in found for name in names], dtype=bool)


def lay_out(
    device_type: LongArray, server: LongArray, is_up: BoolArray, num_types: int
) -> DeviceLayout:
    """Group working devices by server."""
    up = np.flatnonzero(is_up)
    # Stable, so that devices of a server keep their order.
    order = up[np.argsort(server[up], kind="stable")]
    starts = np.flatnonzero(np.diff(server[order], prepend=-1))
    server_ptr, server_type = np.append(starts, len(order)), device_type[order[starts]]
    largest = np.zeros(num_types, dtype=np.int64)
    np.maximum.at(largest, server_type, np.diff(server_ptr))
    return DeviceLayout(
        order=order,
        server_ptr=server_ptr,
        server_type=server_type,
        num_devices=np.bincount(device_type[up], minlength=num_types),
        largest_server=largest,
    )
