"""Commands of users and attempts, each a function on a transaction.

A command that raises an error has changed nothing: it checks first, then calls `step`, then records
the result.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Literal

import numpy as np

from hocket.base.errors import UsageError, unknown_name
from hocket.base.jsonfile import finite_or_none
from hocket.fleet.rounds.dependencies import over_limit
from hocket.fleet.rounds.events import (
    Cancel,
    Drain,
    Finish,
    Pause,
    Progress,
    Reopen,
    Resume,
    Submit,
    Tick,
    TimeOut,
)
from hocket.fleet.rounds.state import ENDED, PAUSED, FleetState, Job
from hocket.fleet.throughputs.table import Throughputs
from hocket.service.daemon.dry_run import dry_run_job
from hocket.service.daemon.elastic import first_gang, resized, speed_on
from hocket.service.daemon.estimates import (
    refuse_estimates,
    with_other_types_estimated,
    with_spec_profile,
)
from hocket.service.daemon.service_state import find, phase_of
from hocket.service.daemon.transaction import Transaction
from hocket.service.errors import (
    ConflictError,
    ForbiddenError,
    KeyReusedError,
    NotFoundError,
    StaleAttemptError,
)
from hocket.service.executors.executor import AttemptName
from hocket.service.records import (
    AttemptRecord,
    CheckpointRecord,
    JobRecord,
    JobStatus,
    LeaseAnswer,
)
from hocket.service.server_config import ServerConfig
from hocket.service.spec import JobSpec, is_preemptible, on_gang, parse_after
from hocket.service.store.tables import KeyRecord

FindKey = Callable[[str], KeyRecord | None]
FindJob = Callable[[int], JobRecord | None]
MAX_EDGES = 10_000
"""Maximum number of dependencies that one submission may add; each is a row of the state."""

# ── people ───────────────────────────────────────────────────────────────────────────────────────


def submit(
    transaction: Transaction,
    spec: JobSpec,
    key: str | None,
    config: ServerConfig,
    find_key: FindKey,
    owner: str = "",
    capacity: Mapping[str, int] | None = None,
    find_job: FindJob = lambda number: None,
    reference: Throughputs | None = None,
) -> int:
    """Add a job, unless the same key added it before.

    Returns its number; for an array, the number of its first job.
    """
    body_hash = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
    # Keys of different users are independent. Keys from REST contain no space, so the joined text
    # is unambiguous.
    key = None if key is None else f"{key} {owner}"
    if key is not None and (known := transaction.keys.get(key) or find_key(key)) is not None:
        if known.body_hash != body_hash:
            hint = "take a new key for another job"
            raise KeyReusedError(f"this key was used for job {known.job}", hint=hint)
        return known.job
    if spec.folder is not None and not PurePath(spec.folder).is_absolute():
        raise UsageError(f"folder {spec.folder!r} is no absolute path", where="folder")
    if spec.model is not None and spec.plans is None:
        raise UsageError(
            f"nobody planned {spec.model!r} for the device types of this fleet",
            hint="hocket fleet submit does that; else name plans and throughputs by device type",
            where="model",
        )
    _refuse_where_it_runs_nowhere(spec, transaction.state.device_types, capacity)
    after = needed_jobs(transaction, spec, owner, find_job)
    number = transaction.last_number + 1
    priority = config.level(spec.priority)
    state, team = _with_name(transaction.state, "teams", spec.team, config)
    state, user = _with_name(state, "users", owner, config)
    refuse_estimates(spec, state.rules, reference)
    gang = first_gang(state, transaction.jobs, number, spec, owner)
    speeds = steps_per_s(spec, state.device_types, gang)
    state, profile = with_spec_profile(state, spec, owner, speeds, reference)
    job = Job(
        number=number,
        name=spec.name,
        steps_per_s=speeds,
        profile=profile,
        total_steps=math.inf if spec.total_steps is None else spec.total_steps,
        gang=gang,
        weight=spec.weight,
        deadline_s=math.inf if spec.deadline_s is None else transaction.time_s + spec.deadline_s,
        team=team,
        preemptible=is_preemptible(spec),
        user=user,
        priority=priority,
        time_limit_s=spec.time_limit_s or config.time_limit_s or math.inf,
        max_failures=0 if spec.retries is None else spec.retries + 1,
        after=after,
    )
    dry_run_job(state, job)
    record = JobRecord(
        number=number, spec=spec, status="queued", submitted_s=transaction.time_s, owner=owner
    )
    jobs, records = [job], [record]
    if spec.array is not None:
        numbers = range(number, number + spec.array)
        jobs = [replace(job, number=one) for one in numbers]
        records = [
            replace(record, number=one, array_first=number, array_index=index)
            for index, one in enumerate(numbers)
        ]
    transaction.apply_event(
        Submit(time_s=transaction.time_s, jobs=tuple(jobs)), state=state, new_jobs=records
    )
    if key is not None:
        transaction.keys[key] = KeyRecord(key=key, body_hash=body_hash, job=number)
    return number


def needed_jobs(
    transaction: Transaction, spec: JobSpec, owner: str, find_job: FindJob
) -> tuple[tuple[int, str], ...]:
    """Jobs for which a new job must wait, because they or their processes have not ended.

    Raises `UsageError` if a job is unknown, or has ended in a way that breaks the condition, or if
    there are too many.
    """
    needed: dict[int, str] = {}
    num_jobs, num_looks = spec.array or 1, 0
    for text in spec.after:
        reference, condition = parse_after(text)
        records = _referred(transaction, reference, owner, find_job)
        # Jobs that have ended are looked up in the store, which takes time too.
        num_looks += len(records)
        for record in records:
            if phase_of(transaction.state, record.number) != ENDED:
                needed[record.number] = condition
                continue
            status = transaction.verdict(record)
            if not _has_ended_so(status, condition):
                raise UsageError(
                    f"job {record.number} has ended ({status}), and this one comes after "
                    f"{'its success' if condition == 'ok' else 'its failure'}",
                    hint=f'write "{record.number}:any" to run it anyway',
                    where="after",
                )
            if record.number in transaction.attempts:
                needed[record.number] = condition
        if max(num_looks, len(needed) * num_jobs) > MAX_EDGES:
            raise UsageError(
                f"this names {num_looks:,} jobs for {num_jobs} to wait for: at most "
                f"{MAX_EDGES:,} dependencies are allowed",
                hint="submit one job that comes after all of those, and these after that one",
                where="after",
            )
    return tuple(needed.items())


def _has_ended_so(status: JobStatus, condition: str) -> bool:
    statuses = {"ok": ("succeeded",), "failed": ("failed", "timed out")}
    return condition == "any" or status in statuses[condition]


def _referred(
    transaction: Transaction, reference: str, owner: str, find_job: FindJob
) -> list[JobRecord]:
    """Jobs to which a reference refers: by number (for an array all its jobs), or the newest open
    job by name.
    """
    if reference.isdecimal() and len(reference) < 16:
        record = transaction.jobs.get(int(reference)) or find_job(int(reference))
    else:
        named = [job for job in transaction.jobs.values() if job.spec.name == reference]
        # The user's own jobs first, because others may use the same names.
        record = max(named, key=lambda job: (job.owner == owner, job.number), default=None)
    if record is None:
        hint = "name a job that has not ended, or give the number of one"
        raise UsageError(f"there is no job {reference!r}", hint=hint, where="after")
    if record.array_first is None:
        return [record]
    others = range(record.array_first, record.array_first + (record.spec.array or 1))
    return [
        found for one in others if (found := transaction.jobs.get(one) or find_job(one)) is not None
    ]


def _refuse_where_it_runs_nowhere(
    spec: JobSpec, device_types: tuple[str, ...], capacity: Mapping[str, int] | None
) -> None:
    gangs = spec.gangs or (spec.gang,)
    known = {
        on_gang(spec, gang, device_type): None for gang in gangs for device_type in device_types
    }
    if spec.throughputs is not None and not any(name in known for name in spec.throughputs):
        # Some names may be unknown, because a job file may serve other clusters than this one.
        name = next(iter(spec.throughputs), "")
        raise unknown_name("device type", name, tuple(known), where="throughputs")
    if capacity is None:
        return
    most = max((n for k, n in capacity.items() if any(speed_on(spec, k, g) for g in gangs)),
               default=0)  # fmt: skip
    if min(gangs) > most:
        raise UsageError(
            f"no device type that this job may use has {min(gangs)} devices; the most is {most}",
            hint="lower gang, or serve with more devices",
            where="gang",
        )


def steps_per_s(
    spec: JobSpec, device_types: tuple[str, ...], gang: int | None = None
) -> tuple[float, ...]:
    """Steps per second of a job on each device type; equal on all types if nothing is known."""
    return tuple(speed_on(spec, device_type, gang) for device_type in device_types)


def _with_name(
    state: FleetState, column: Literal["teams", "users"], name: str, config: ServerConfig
) -> tuple[FleetState, int]:
    """The state with a team or user added if new, and the index of that team or user."""
    names: tuple[str, ...] = getattr(state, column)
    if name not in names:
        names = (*names, name)
        state = with_config(state.but(**{column: names}), config)
    return state, names.index(name)


def with_config(state: FleetState, config: ServerConfig) -> FleetState:
    """The state with the weights and quotas of users and teams from the config."""
    users = [config.limits_of(user) for user in state.users]
    teams = [config.quota_of_team(team) for team in state.teams]
    return state.but(
        user_weight=np.array([user.weight for user in users]),
        team_weight=np.array([team.weight for team in teams]),
        user_quota=np.array([user.limits for user in users]),
        # Jobs without a team belong to the first team, which has no limits.
        team_quota=np.array([(math.inf, math.inf), *(team.limits for team in teams[1:])]),
    )


Change = Literal["cancel", "pause", "resume"]


def change_job(
    transaction: Transaction,
    change: Change,
    number: int,
    version: int | None,
    find_job: FindJob,
    only_of: str | None = None,
) -> None:
    """Cancel, pause or resume a job; has no effect if the change was made before."""
    record = _record(transaction, number, version, find_job, only_of)
    phase, time_s = phase_of(transaction.state, number), transaction.time_s
    if phase == ENDED:
        # A cancelled job may still be stopping; a second cancel is no error.
        if change == "cancel" and record.status not in ("succeeded", "failed", "timed out"):
            return
        raise ConflictError(f"job {number} has ended ({record.status})")
    if change == "cancel":
        transaction.apply_event(Cancel(time_s=time_s, numbers=(number,)))
        transaction.put_job(replace(transaction.jobs[number], message="cancelled"))
        transaction.note_end_of_job(number, "cancelled")
    elif (change == "pause") != (phase == PAUSED):
        event = Pause if change == "pause" else Resume
        transaction.apply_event(event(time_s=time_s, numbers=(number,)))
        transaction.put_job(transaction.jobs[number])
        transaction.note(f"{change}d", number)


def _record(
    transaction: Transaction,
    number: int,
    version: int | None,
    find_job: FindJob,
    only_of: str | None,
) -> JobRecord:
    """Record of the job to change; ``only_of`` is the user who requests the change, None for an
    admin.
    """
    record = transaction.jobs.get(number) or find_job(number)
    if record is None:
        raise NotFoundError(f"there is no job {number}")
    if only_of is not None and record.owner != only_of:
        hint = f"ask {record.owner!r} or an admin" if record.owner else "ask an admin"
        raise ForbiddenError(f"job {number} is not one of {only_of!r}", hint=hint)
    current = transaction.version_of(record)
    if version is not None and version != current:
        raise ConflictError(
            f"job {number} has changed since: it is at version {current}, not {version}",
            hint="look at it again, then decide",
        )
    return record


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def report(
    transaction: Transaction,
    name: AttemptName,
    token: str,
    done_steps: float,
    is_finished: bool,
    can_save: bool = False,
    reference: Throughputs | None = None,
) -> LeaseAnswer:
    """Record the progress of an attempt; return a lease that permits or ends its run."""
    _check_steps(done_steps)
    attempt = _proven(transaction, name, token)
    if phase_of(transaction.state, name.job) != ENDED:
        if can_save:
            transaction.note_that_it_saves(name.job)
        if attempt.stopping_since_s is None:
            job = transaction.jobs[name.job]
            is_stated = job.spec.throughputs is not None
            transaction.apply_event(
                Progress(
                    time_s=transaction.time_s,
                    number=name.job,
                    attempt=name.attempt,
                    done_steps=done_steps,
                    replaces_guess=not is_stated and job.done_steps == 0.0,
                )
            )
            transaction.state = with_other_types_estimated(
                transaction.state, name.job, job.spec, reference
            )
        transaction.put_job(replace(transaction.jobs[name.job], done_steps=done_steps))
        if is_finished:
            finish(transaction, name.job)
        elif attempt.stopping_since_s is not None:
            transaction.note_told_to_stop(attempt)
    return lease(transaction, name)


def finish(transaction: Transaction, *numbers: int) -> None:
    """Mark jobs as finished."""
    transaction.apply_event(Finish(time_s=transaction.time_s, numbers=numbers))
    for number in numbers:
        job = transaction.jobs[number]
        done_steps = job.spec.total_steps or job.done_steps
        transaction.put_job(replace(job, done_steps=done_steps, message="finished"))
        transaction.note_end_of_job(number, "finished")


def lease(transaction: Transaction, name: AttemptName) -> LeaseAnswer:
    """Lease of an attempt: permission to continue, with its end, or the time by which it must
    stop."""
    attempt = find(transaction.attempts, name)
    if attempt is None or attempt.stopping_since_s is not None:
        since_s = (
            transaction.time_s
            if attempt is None
            else attempt.stopping_since_s or transaction.time_s
        )
        grace_s = transaction.jobs[name.job].spec.grace_s
        return LeaseAnswer(attempt=name.attempt, may_run=False, stop_by_s=since_s + grace_s)
    round_ends_s = finite_or_none(transaction.state.next_tick_s)
    return LeaseAnswer(attempt=name.attempt, may_run=True, round_ends_s=round_ends_s)


def commit_checkpoint(
    transaction: Transaction, name: AttemptName, token: str, step: float, path: str
) -> CheckpointRecord:
    """Record a checkpoint to resume from, also while the attempt is being stopped.

    If the newest checkpoint has more steps, nothing is recorded and that one is returned.
    """
    _check_steps(step)
    attempt = _proven(transaction, name, token)
    newest = transaction.checkpoints.get(name.job)
    if newest is not None and step < newest.step:
        # Resuming from the older checkpoint would lose work of the job.
        return newest
    transaction.note_that_it_saves(name.job)
    if attempt.stopping_since_s is None:
        # Preemption prefers jobs that lose less work, so the steps saved are part of the state.
        transaction.apply_event(
            Progress(
                time_s=transaction.time_s, number=name.job, attempt=name.attempt, saved_steps=step
            )
        )
    checkpoint = CheckpointRecord(
        job=name.job, attempt=name.attempt, step=step, path=path, committed_s=transaction.time_s
    )
    transaction.put_checkpoint(checkpoint)
    return checkpoint


def _check_steps(steps: float) -> None:
    if not 0.0 <= steps < math.inf:
        raise UsageError(f"{steps!r} is no number of steps")


def _proven(transaction: Transaction, name: AttemptName, token: str) -> AttemptRecord:
    """The attempt that sent a request; raises an error unless its token is right and it has not
    ended.
    """
    attempt = find(transaction.attempts, name)
    is_right = attempt is not None and hmac.compare_digest(attempt.token.encode(), token.encode())
    if attempt is None or attempt.started_s is None or not is_right:
        raise StaleAttemptError(
            f"attempt {name.attempt} does not hold job {name.job}",
            hint="it was stopped or lost; what it does no longer counts, so it should exit",
        )
    return attempt


# ── time ─────────────────────────────────────────────────────────────────────────────────────────


def tick(transaction: Transaction) -> None:
    """Stop jobs that have reached their time limits, and begin a round if one is due."""
    expired = over_limit(transaction.state, transaction.time_s)
    if expired:
        transaction.apply_event(TimeOut(time_s=transaction.time_s, numbers=expired))
    for number in expired:
        limit_s = _time_limit_s(transaction.state, number)
        message = f"held its devices for {limit_s:.0f} s, its time limit"
        transaction.put_job(replace(transaction.jobs[number], message=message))
        transaction.note_end_of_job(number, "timed out")
    if transaction.time_s >= transaction.state.next_tick_s:
        sizes = resized(transaction.state, transaction.jobs, transaction.time_s)
        if sizes is not None:
            transaction.apply_event(sizes)
        transaction.apply_event(Tick(time_s=transaction.time_s))


def _time_limit_s(state: FleetState, number: int) -> float:
    rows = state.jobs.rows
    return float(rows["time_limit_s"][np.searchsorted(rows["number"], number)])


# ── devices ──────────────────────────────────────────────────────────────────────────────────────


def drain(transaction: Transaction, names: tuple[str, ...]) -> None:
    """Drain devices: they take no new jobs, and preemptible jobs leave them."""
    transaction.apply_event(Drain(time_s=transaction.time_s, names=names))
    transaction.note("drained", devices=list(names))


def reopen(transaction: Transaction, names: tuple[str, ...]) -> None:
    """Let drained devices take jobs again."""
    transaction.apply_event(Reopen(time_s=transaction.time_s, names=names))
    transaction.note("reopened", devices=list(names))
