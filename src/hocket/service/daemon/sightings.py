"""What executors see, told to the daemon: each a function on a draft, as in `commands`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hocket.fleet.rounds.events import (
    AddDevices,
    Cancel,
    Fail,
    Lose,
    RemoveDevices,
)
from hocket.fleet.rounds.state import ENDED, RUNNING, FleetDevice
from hocket.service.daemon.commands import finish
from hocket.service.daemon.draft import BatchDraft
from hocket.service.daemon.world import find, kinds_up, phase_of
from hocket.service.executors.executor import LOST, AttemptName, Status
from hocket.service.records import AttemptRecord

NEVER_RAN = (126, 127)
"""Exit codes of a command that is not there or cannot be executed, as shells have it."""
MADE_WAY = ("preempted", "moved", "drained")
"""Why rounds stop an attempt whose job goes on."""


def begun(draft: BatchDraft, names: Sequence[AttemptName]) -> None:
    """The processes of some attempts run."""
    for name in names:
        attempt = find(draft.attempts, name)
        if attempt is not None and attempt.stopping_since_s is None:
            draft.put_job(replace(draft.jobs[name.job], status="running"))


def ended(draft: BatchDraft, statuses: Sequence[Status]) -> None:
    """Nothing of some attempts runs any more."""
    finished = [status.name for status in statuses if _has_finished(draft, status)]
    for name in finished:
        draft.close(name, "finished", 0)
    if finished:
        finish(draft, *(name.job for name in finished))
    for status in statuses:
        # Those that finished are closed by now.
        if (attempt := find(draft.attempts, status.name)) is not None:
            _end(draft, attempt, status)


def _has_finished(draft: BatchDraft, status: Status) -> bool:
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


def _end(draft: BatchDraft, attempt: AttemptRecord, status: Status) -> None:
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


def _count_loss(draft: BatchDraft, number: int, status: Status) -> None:
    """Tell the rounds of an attempt that made way for others and left less than it had done: did
    not end by itself, or reported more steps than it saved."""
    job, checkpoint = draft.jobs[number], draft.checkpoints.get(number)
    saved_steps = 0.0 if checkpoint is None else checkpoint.step
    if status.exit_code == 0 and job.done_steps <= saved_steps:
        return
    draft.happen(Lose(time_s=draft.time_s, number=number, saved_steps=saved_steps))
    draft.put_job(replace(draft.jobs[number], done_steps=saved_steps))
    draft.note("work-lost", number, attempt=status.name.attempt, saved_steps=saved_steps)


def _give_up(draft: BatchDraft, number: int, message: str) -> None:
    """A job whose command cannot be run: trying again would not help."""
    job = draft.jobs[number]
    draft.happen(Cancel(time_s=draft.time_s, numbers=(number,), is_failure=True))
    draft.put_job(replace(job, failures=job.failures + 1, message=message))
    draft.end(number, "given up")


def silent(draft: BatchDraft, name: AttemptName, silence_s: float) -> None:
    """An attempt reported nothing for too long: it is stopped, and counts as failed."""
    attempt = find(draft.attempts, name)
    if attempt is not None and attempt.stopping_since_s is None:
        _fail(draft, name, f"attempt {name.attempt} reported nothing for {silence_s:.0f} s")


def _fail(draft: BatchDraft, name: AttemptName, message: str) -> None:
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


def see_devices(draft: BatchDraft, devices: tuple[FleetDevice, ...]) -> None:
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


def see_unknown_kinds(draft: BatchDraft, kinds: Sequence[str]) -> None:
    """Devices came that nothing can run on: nobody said how fast jobs are there."""
    for kind in kinds:
        draft.note("kind-unknown", device_kind=kind)
