"""What people, processes and executors tell the daemon, each as a function on a draft.

A command that raises has changed nothing: it checks first, then lets `step` decide, then notes.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np

from hocket.base.errors import UsageError, unknown_name
from hocket.fleet.rounds.events import (
    AddDevices,
    Cancel,
    Fail,
    Finish,
    Lose,
    Pause,
    Progress,
    RemoveDevices,
    Resume,
    Submit,
    Tick,
)
from hocket.fleet.rounds.state import ENDED, PAUSED, RUNNING, Device, Job, State
from hocket.service.daemon.draft import Draft
from hocket.service.daemon.rehearse import rehearse_job
from hocket.service.daemon.untried import with_untried_levelled
from hocket.service.daemon.world import find, kinds_up, phase_of
from hocket.service.errors import (
    ConflictError,
    KeyReusedError,
    NotFoundError,
    StaleAttemptError,
)
from hocket.service.executors.executor import LOST, AttemptName, Status
from hocket.service.records import AttemptRecord, CheckpointRecord, JobRecord, Lease
from hocket.service.spec import JobSpec, is_preemptible
from hocket.service.store.batch import KeyRecord

FindKey = Callable[[str], KeyRecord | None]
FindJob = Callable[[int], JobRecord | None]
_MAX_KEY = 200
NEVER_RAN = (126, 127)
"""Exit codes of a command that is not there or cannot be executed, as shells have it."""
MADE_WAY = ("preempted", "moved")
"""Why rounds stop an attempt whose job goes on."""

# ── people ───────────────────────────────────────────────────────────────────────────────────────


def submit(
    draft: Draft,
    spec: JobSpec,
    key: str | None,
    team_weights: dict[str, float],
    find_key: FindKey,
    owner: str = "",
    capacity: Mapping[str, int] | None = None,
) -> int:
    """A new job, or the one that the same key made before; its number."""
    if key is not None and not (0 < len(key) <= _MAX_KEY and key.isascii() and key.isprintable()):
        raise UsageError(f"an idempotency key is a short text, at most {_MAX_KEY} characters")
    body_hash = hashlib.sha256(spec.model_dump_json().encode()).hexdigest()
    if key is not None and (known := draft.keys.get(key) or find_key(key)) is not None:
        if known.body_hash != body_hash:
            hint = "take a new key for another job"
            raise KeyReusedError(f"this key was used for job {known.job}", hint=hint)
        return known.job
    if spec.folder is not None and not PurePath(spec.folder).is_absolute():
        raise UsageError(f"folder {spec.folder!r} is no absolute path", where="folder")
    kinds = draft.state.kinds
    if spec.throughputs is not None and not any(kind in kinds for kind in spec.throughputs):
        # One of several may be unknown: a job file may serve more clusters than this one.
        name = next(iter(spec.throughputs), "")
        raise unknown_name("kind of device", name, kinds, where="throughputs")
    most = max((num for kind, num in (capacity or {}).items() if speed_on(spec, kind)), default=0)
    if capacity is not None and spec.gang > most:
        raise UsageError(
            f"no kind that this job may use has {spec.gang} devices; the most is {most}",
            hint="lower gang, or serve with more devices",
            where="gang",
        )
    number = draft.last_number + 1
    state, team = with_team(draft.state, spec.team, team_weights)
    job = Job(
        number=number,
        name=spec.name,
        steps_per_s=steps_per_s(spec, state.kinds),
        total_steps=math.inf if spec.total_steps is None else spec.total_steps,
        gang=spec.gang,
        weight=spec.weight,
        deadline_s=math.inf if spec.deadline_s is None else draft.time_s + spec.deadline_s,
        team=team,
        preemptible=is_preemptible(spec),
    )
    rehearse_job(state, job)
    record = JobRecord(
        number=number, spec=spec, status="queued", submitted_s=draft.time_s, owner=owner
    )
    draft.happen(Submit(time_s=draft.time_s, jobs=(job,)), state=state, new_job=record)
    if key is not None:
        draft.keys[key] = KeyRecord(key=key, body_hash=body_hash, job=number)
    return number


def steps_per_s(spec: JobSpec, kinds: tuple[str, ...]) -> tuple[float, ...]:
    """What is known of a job's speed on each kind; the same everywhere where nothing is."""
    return tuple(speed_on(spec, kind) for kind in kinds)


def speed_on(spec: JobSpec, kind: str) -> float:
    """Steps per second on a kind of devices; 0 where the job must not run there."""
    return 1.0 if spec.throughputs is None else spec.throughputs.get(kind, 0.0)


def with_team(state: State, team: str, weights: dict[str, float]) -> tuple[State, int]:
    """The state with a team in it, and the team's index."""
    if team in state.teams:
        return state, state.teams.index(team)
    weight = np.append(state.team_weight, weights.get(team, 1.0))
    return state.but(teams=(*state.teams, team), team_weight=weight), len(state.teams)


def cancel(draft: Draft, number: int, version: int | None, find_job: FindJob) -> None:
    """End a job; nothing happens to one that was cancelled before."""
    record = _record(draft, number, version, find_job)
    if record.status == "cancelled" or phase_of(draft.state, number) == ENDED:
        return _refuse_ended(record)
    draft.happen(Cancel(time_s=draft.time_s, numbers=(number,)))
    draft.put_job(replace(draft.jobs[number], message="cancelled"))
    draft.end(number, "cancelled")
    return None


def pause(draft: Draft, number: int, version: int | None, find_job: FindJob) -> None:
    """Let a job hold no devices until it is resumed."""
    record = _record(draft, number, version, find_job)
    phase = phase_of(draft.state, number)
    if phase == ENDED:
        raise ConflictError(f"job {number} has ended ({record.status})")
    if phase != PAUSED:
        draft.happen(Pause(time_s=draft.time_s, numbers=(number,)))
        draft.put_job(draft.jobs[number])
        draft.note("paused", number)


def resume(draft: Draft, number: int, version: int | None, find_job: FindJob) -> None:
    """Let a paused job have devices again."""
    record = _record(draft, number, version, find_job)
    phase = phase_of(draft.state, number)
    if phase == ENDED:
        raise ConflictError(f"job {number} has ended ({record.status})")
    if phase == PAUSED:
        draft.happen(Resume(time_s=draft.time_s, numbers=(number,)))
        draft.put_job(draft.jobs[number])
        draft.note("resumed", number)


def _record(draft: Draft, number: int, version: int | None, find_job: FindJob) -> JobRecord:
    record = draft.jobs.get(number) or find_job(number)
    if record is None:
        raise NotFoundError(f"there is no job {number}")
    current = draft.version_of(record)
    if version is not None and version != current:
        raise ConflictError(
            f"job {number} has changed since: it is at version {current}, not {version}",
            hint="look at it again, then decide",
        )
    return record


def _refuse_ended(record: JobRecord) -> None:
    if record.status in ("succeeded", "failed"):
        raise ConflictError(f"job {record.number} has ended ({record.status})")


# ── processes ────────────────────────────────────────────────────────────────────────────────────


def report(
    draft: Draft,
    name: AttemptName,
    token: str,
    done_steps: float,
    is_finished: bool,
    can_save: bool = False,
) -> Lease:
    """What an attempt did so far; answers whether it may go on."""
    _check_steps(done_steps)
    attempt = _proven(draft, name, token)
    if phase_of(draft.state, name.job) != ENDED:
        if can_save:
            draft.note_that_it_saves(name.job)
        if attempt.stopping_since_s is None:
            job = draft.jobs[name.job]
            is_stated = job.spec.throughputs is not None
            draft.happen(
                Progress(
                    time_s=draft.time_s,
                    number=name.job,
                    attempt=name.attempt,
                    done_steps=done_steps,
                    replaces_guess=not is_stated and job.done_steps == 0.0,
                )
            )
            if not is_stated:
                draft.state = with_untried_levelled(draft.state, name.job)
        draft.put_job(replace(draft.jobs[name.job], done_steps=done_steps))
        if is_finished:
            _finish(draft, name.job)
        elif attempt.stopping_since_s is not None:
            draft.note_that_it_knows(attempt)
    return lease(draft, name)


def _finish(draft: Draft, *numbers: int) -> None:
    draft.happen(Finish(time_s=draft.time_s, numbers=numbers))
    for number in numbers:
        job = draft.jobs[number]
        done_steps = job.spec.total_steps or job.done_steps
        draft.put_job(replace(job, done_steps=done_steps, message="finished"))
        draft.end(number, "finished")


def lease(draft: Draft, name: AttemptName) -> Lease:
    """Whether an attempt may go on, and until when."""
    attempt = find(draft.attempts, name)
    if attempt is None or attempt.stopping_since_s is not None:
        since_s = draft.time_s if attempt is None else attempt.stopping_since_s or draft.time_s
        grace_s = draft.jobs[name.job].spec.grace_s
        return Lease(attempt=name.attempt, may_run=False, stop_by_s=since_s + grace_s)
    ends_s = float(draft.state.next_tick_s)
    round_ends_s = ends_s if math.isfinite(ends_s) else None
    return Lease(attempt=name.attempt, may_run=True, round_ends_s=round_ends_s)


def commit_checkpoint(
    draft: Draft, name: AttemptName, token: str, step: float, path: str
) -> CheckpointRecord:
    """A checkpoint that the next attempt begins with; also of an attempt that is being stopped. One
    of fewer steps than the newest does not count, which is then answered."""
    _check_steps(step)
    attempt = _proven(draft, name, token)
    newest = draft.checkpoints.get(name.job)
    if newest is not None and step < newest.step:
        # Whatever it is for, the job would lose work if it went on from there.
        return newest
    draft.note_that_it_saves(name.job)
    if attempt.stopping_since_s is None:
        # Of two jobs that may be displaced, the one that would lose less work is.
        draft.happen(
            Progress(time_s=draft.time_s, number=name.job, attempt=name.attempt, saved_steps=step)
        )
    checkpoint = CheckpointRecord(
        job=name.job, attempt=name.attempt, step=step, path=path, committed_s=draft.time_s
    )
    draft.put_checkpoint(checkpoint)
    return checkpoint


def _check_steps(steps: float) -> None:
    if not 0.0 <= steps < math.inf:
        raise UsageError(f"{steps!r} is no number of steps")


def _proven(draft: Draft, name: AttemptName, token: str) -> AttemptRecord:
    """The attempt that speaks: started and not ended, so that no newer one of its job runs."""
    attempt = find(draft.attempts, name)
    is_right = attempt is not None and hmac.compare_digest(attempt.token.encode(), token.encode())
    if attempt is None or attempt.started_s is None or not is_right:
        raise StaleAttemptError(
            f"attempt {name.attempt} does not hold job {name.job}",
            hint="it was stopped or lost; what it does no longer counts, so it should exit",
        )
    return attempt


# ── executors and time ───────────────────────────────────────────────────────────────────────────


def begun(draft: Draft, names: Sequence[AttemptName]) -> None:
    """The processes of some attempts run."""
    for name in names:
        attempt = find(draft.attempts, name)
        if attempt is not None and attempt.stopping_since_s is None:
            draft.put_job(replace(draft.jobs[name.job], status="running"))


def ended(draft: Draft, statuses: Sequence[Status]) -> None:
    """Nothing of some attempts runs any more."""
    finished = [status.name for status in statuses if _has_finished(draft, status)]
    for name in finished:
        draft.close(name, "finished", 0)
    if finished:
        _finish(draft, *(name.job for name in finished))
    for status in statuses:
        # Those that finished are closed by now.
        if (attempt := find(draft.attempts, status.name)) is not None:
            _end(draft, attempt, status)


def _has_finished(draft: Draft, status: Status) -> bool:
    """Whether the job is done: the command ended well, and not because it was asked to end.

    One that ended in the same instant as it was to be stopped may have been done before it knew,
    be it by a signal or by the answer to its report.
    """
    attempt = find(draft.attempts, status.name)
    if attempt is None or status.phase == LOST or status.exit_code != 0:
        return False
    if attempt.stopping_since_s is None:
        return True
    was_asked = status.was_asked or attempt.knows_it_must_leave
    return not was_asked and phase_of(draft.state, status.name.job) != ENDED


def _end(draft: Draft, attempt: AttemptRecord, status: Status) -> None:
    name = status.name
    if attempt.stopping_since_s is not None:
        draft.close(name, attempt.outcome, status.exit_code)
        if attempt.outcome in MADE_WAY and phase_of(draft.state, name.job) != ENDED:
            _count_loss(draft, name.job, status)
        return
    draft.close(name, "lost" if status.phase == LOST else "failed", status.exit_code)
    if status.exit_code in NEVER_RAN:
        _give_up(draft, name.job, _complaint(status))
    else:
        _fail(draft, name, _complaint(status))


def _count_loss(draft: Draft, number: int, status: Status) -> None:
    """Tell the rounds of an attempt that made way for others and left less than it had done: did
    not end by itself, or reported more steps than it saved."""
    job, checkpoint = draft.jobs[number], draft.checkpoints.get(number)
    saved_steps = 0.0 if checkpoint is None else checkpoint.step
    if status.exit_code == 0 and job.done_steps <= saved_steps:
        return
    draft.happen(Lose(time_s=draft.time_s, number=number, saved_steps=saved_steps))
    draft.put_job(replace(draft.jobs[number], done_steps=saved_steps))
    draft.note("work-lost", number, attempt=status.name.attempt, saved_steps=saved_steps)


def _give_up(draft: Draft, number: int, message: str) -> None:
    """A job whose command cannot be run: trying again would not help."""
    job = draft.jobs[number]
    draft.happen(Cancel(time_s=draft.time_s, numbers=(number,)))
    draft.put_job(replace(job, failures=job.failures + 1, message=message))
    draft.end(number, "given up")


def silent(draft: Draft, name: AttemptName, silence_s: float) -> None:
    """An attempt reported nothing for too long: it is stopped, and counts as failed."""
    attempt = find(draft.attempts, name)
    if attempt is not None and attempt.stopping_since_s is None:
        _fail(draft, name, f"attempt {name.attempt} reported nothing for {silence_s:.0f} s")


def _fail(draft: Draft, name: AttemptName, message: str) -> None:
    assert phase_of(draft.state, name.job) == RUNNING
    checkpoint = draft.checkpoints.get(name.job)
    done_steps = None if checkpoint is None else checkpoint.step
    job = draft.jobs[name.job]
    job = replace(job, failures=job.failures + 1, message=message)
    draft.put_job(job if done_steps is None else replace(job, done_steps=done_steps))
    draft.happen(
        Fail(time_s=draft.time_s, number=name.job, attempt=name.attempt, done_steps=done_steps)
    )


def _complaint(status: Status) -> str:
    """How an attempt failed, in words."""
    attempt = f"attempt {status.name.attempt}"
    detail = f": {status.detail}" if status.detail else ""
    if status.phase == LOST:
        return f"{attempt} was lost{detail}"
    if status.exit_code is None:
        return f"{attempt} could not be run{detail}"
    if status.exit_code < 0:
        return f"{attempt} was killed by signal {-status.exit_code}{detail}"
    return f"{attempt} ended with exit code {status.exit_code}{detail}"


def see_devices(draft: Draft, devices: tuple[Device, ...]) -> None:
    """What is there now, of kinds that the fleet knows, against what the state believes."""
    up = kinds_up(draft.state)
    there = {device.name: device.kind for device in devices if device.kind in draft.state.kinds}
    lost = tuple(name for name, kind in up.items() if there.get(name) != kind)
    kept = up.keys() - set(lost)
    new = tuple(device for device in devices if device.name in there.keys() - kept)
    if lost:
        draft.happen(RemoveDevices(time_s=draft.time_s, names=lost))
        for name in lost:
            draft.note("device-lost", device=name)
    if new:
        draft.happen(AddDevices(time_s=draft.time_s, devices=new))
        for device in new:
            draft.note("device-added", device=device.name, device_kind=device.kind)


def see_unknown_kinds(draft: Draft, kinds: Sequence[str]) -> None:
    """Devices came that nothing can run on: nobody said how fast jobs are there."""
    for kind in kinds:
        draft.note("kind-unknown", device_kind=kind)


def tick(draft: Draft) -> None:
    """Begin a round where one is due."""
    if draft.time_s >= draft.state.next_tick_s:
        draft.happen(Tick(time_s=draft.time_s))
