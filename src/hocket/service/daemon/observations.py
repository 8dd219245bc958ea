"""Commands that apply what the executor observed, each a function on a transaction."""

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
from hocket.service.daemon.service_state import find, phase_of, types_up
from hocket.service.daemon.transaction import Transaction
from hocket.service.executors.executor import LOST, AttemptName, Status
from hocket.service.records import AttemptRecord

NEVER_RAN = (126, 127)
"""Exit codes by which shells report a command that is missing or cannot be executed."""
PREEMPTED_OUTCOMES = ("preempted", "moved", "drained")
"""Outcomes of attempts that were stopped for other jobs or for a drain."""
_OTHER_INTERRUPTIONS = ("resized", "paused")
"""Outcomes of other attempts that were stopped although their job goes on later."""


def begun(transaction: Transaction, names: Sequence[AttemptName]) -> None:
    """Record that attempts have begun to run."""
    for name in names:
        attempt = find(transaction.attempts, name)
        if attempt is not None and attempt.stopping_since_s is None:
            transaction.put_job(replace(transaction.jobs[name.job], status="running"))


def ended(transaction: Transaction, statuses: Sequence[Status]) -> None:
    """Record that attempts have ended: none of their processes is left."""
    finished = [status.name for status in statuses if _has_finished(transaction, status)]
    for name in finished:
        transaction.close_attempt(name, "finished", 0)
    if finished:
        finish(transaction, *(name.job for name in finished))
    for status in statuses:
        # Finished attempts are closed by now.
        if (attempt := find(transaction.attempts, status.name)) is not None:
            _end(transaction, attempt, status)


def _has_finished(transaction: Transaction, status: Status) -> bool:
    """True if the job is done: the command succeeded, and not because it was asked to stop.

    A command that ended at the same instant as its stop was decided may have finished before it
    received the stop, as a signal or as the response to its report.
    """
    attempt = find(transaction.attempts, status.name)
    if attempt is None or status.phase == LOST or status.exit_code != 0:
        return False
    if attempt.stopping_since_s is None:
        return True
    was_asked = status.was_asked or attempt.knows_it_must_leave
    return not was_asked and phase_of(transaction.state, status.name.job) != ENDED


def _end(transaction: Transaction, attempt: AttemptRecord, status: Status) -> None:
    name = status.name
    if attempt.stopping_since_s is not None:
        transaction.close_attempt(name, attempt.outcome, status.exit_code)
        goes_on = phase_of(transaction.state, name.job) != ENDED
        if goes_on and attempt.outcome in (*PREEMPTED_OUTCOMES, *_OTHER_INTERRUPTIONS):
            _count_loss(transaction, name, attempt.outcome, status.exit_code)
        return
    transaction.close_attempt(name, "lost" if status.phase == LOST else "failed", status.exit_code)
    if status.exit_code in NEVER_RAN:
        _give_up(transaction, name.job, _complaint(status))
    else:
        _fail(transaction, name, _complaint(status))


def _count_loss(
    transaction: Transaction, name: AttemptName, outcome: str, exit_code: int | None
) -> None:
    """Report an attempt that lost work when it was stopped to the rounds.

    A preempted attempt did if it did not end by itself, or reported more steps than it saved. Of an
    attempt that was paused or resized both must hold: few commands answer the signal, and a job
    that loses work keeps its number of devices for good.
    """
    number = name.job
    job, checkpoint = transaction.jobs[number], transaction.checkpoints.get(number)
    saved_steps = 0.0 if checkpoint is None else checkpoint.step
    signs = (exit_code != 0, job.done_steps > saved_steps)
    if not (any(signs) if outcome in PREEMPTED_OUTCOMES else all(signs)):
        return
    transaction.apply_event(Lose(time_s=transaction.time_s, number=number, saved_steps=saved_steps))
    transaction.put_job(replace(transaction.jobs[number], done_steps=saved_steps))
    transaction.note("work-lost", number, attempt=name.attempt, saved_steps=saved_steps)


def _give_up(transaction: Transaction, number: int, message: str) -> None:
    """End a job whose command cannot be executed, because a retry would not help."""
    job = transaction.jobs[number]
    transaction.apply_event(Cancel(time_s=transaction.time_s, numbers=(number,), is_failure=True))
    transaction.put_job(replace(job, failures=job.failures + 1, message=message))
    transaction.note_end_of_job(number, "given up")


def silent(transaction: Transaction, name: AttemptName, silence_s: float) -> None:
    """Stop an attempt that reported nothing for too long, and count it as failed."""
    attempt = find(transaction.attempts, name)
    if attempt is not None and attempt.stopping_since_s is None:
        _fail(transaction, name, f"attempt {name.attempt} reported nothing for {silence_s:.0f} s")


def _fail(transaction: Transaction, name: AttemptName, message: str) -> None:
    assert phase_of(transaction.state, name.job) == RUNNING
    checkpoint = transaction.checkpoints.get(name.job)
    done_steps = None if checkpoint is None else checkpoint.step
    job = transaction.jobs[name.job]
    job = replace(job, failures=job.failures + 1, message=message)
    transaction.put_job(job if done_steps is None else replace(job, done_steps=done_steps))
    transaction.apply_event(
        Fail(
            time_s=transaction.time_s, number=name.job, attempt=name.attempt, done_steps=done_steps
        )
    )


def _complaint(status: Status) -> str:
    """Describe how an attempt failed."""
    attempt = f"attempt {status.name.attempt}"
    detail = f": {status.detail}" if status.detail else ""
    if status.phase == LOST:
        return f"{attempt} was lost{detail}"
    if status.exit_code is None:
        return f"{attempt} could not be run{detail}"
    if status.exit_code < 0:
        return f"{attempt} was killed by signal {-status.exit_code}{detail}"
    return f"{attempt} ended with exit code {status.exit_code}{detail}"


def see_devices(transaction: Transaction, devices: tuple[FleetDevice, ...]) -> None:
    """Add and remove devices of known types, so that the state matches the executor."""
    up = types_up(transaction.state)
    there = {
        device.name: device.device_type
        for device in devices
        if device.device_type in transaction.state.device_types
    }
    lost = tuple(name for name, device_type in up.items() if there.get(name) != device_type)
    kept = up.keys() - set(lost)
    new = tuple(device for device in devices if device.name in there.keys() - kept)
    if lost:
        transaction.apply_event(RemoveDevices(time_s=transaction.time_s, names=lost))
        for name in lost:
            transaction.note("device-lost", device=name)
    if new:
        transaction.apply_event(AddDevices(time_s=transaction.time_s, devices=new))
        for device in new:
            transaction.note("device-added", device=device.name, device_type=device.device_type)


def see_unknown_types(transaction: Transaction, device_types: Sequence[str]) -> None:
    """Record devices of unknown types, which stay unused because no job has a speed for them."""
    for device_type in device_types:
        transaction.note("device-type-unknown", device_type=device_type)
