"""The next state under construction: changes of a batch of commands, and the rows to store.

Decisions come from `step`; here they become attempts and records. Nothing is visible to others
before the batch is committed; if the commit fails, the transaction is discarded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hocket.fleet.rounds.actions import Start, Stop
from hocket.fleet.rounds.events import Cancel, Event, Fail, Finish, Leave, Submit, TimeOut
from hocket.fleet.rounds.state import BLOCKED, PAUSED, RUNNING, FleetState
from hocket.fleet.rounds.state import ENDED as STATE_ENDED
from hocket.fleet.rounds.step import step
from hocket.service.daemon.decision_log import (
    describe_reserved,
    describe_start,
    describe_stop,
)
from hocket.service.daemon.service_state import ServiceState, find, name_of, phase_of
from hocket.service.executors.executor import AttemptName
from hocket.service.records import (
    ENDED,
    AttemptRecord,
    CheckpointRecord,
    EventRecord,
    JobRecord,
    JobStatus,
)
from hocket.service.store.tables import Batch, KeyRecord

# Preemptibility: a job that cannot resume loses its work each time it is stopped, and may never
# end. So a job without resume arguments keeps its devices until it shows that it saves its work: a
# lease with a save function says so in its first report.


def with_preemptible(state: FleetState, number: int) -> FleetState:
    """The state in which a job may be stopped for others."""
    rows = state.jobs.rows
    at = int(np.searchsorted(rows["number"], number))
    if at >= len(rows) or rows["number"][at] != number or rows["preemptible"][at] > 0:
        return state
    changed = rows.copy()
    changed["preemptible"][at] = 1
    return state.but(jobs=state.jobs._replace(rows=changed))


_VERDICTS: dict[str, JobStatus] = {
    "finished": "succeeded",
    "cancelled": "cancelled",
    "given up": "failed",
    "timed out": "timed out",
    "dependency": "cancelled",
}
"""Final status of a job, by the reason of its end."""


class Transaction:
    """Collects the changes of one batch; `finish` returns the new state and the rows to store.

    The event is applied to ``state`` if that is not None, else to the transaction's state.
    """

    def __init__(
        self, service_state: ServiceState, time_s: float, new_token: Callable[[], str]
    ) -> None:
        self.time_s = time_s
        self.state = service_state.state
        self.jobs = dict(service_state.jobs)
        self.attempts = dict(service_state.attempts)
        self.checkpoints = dict(service_state.checkpoints)
        self.last_number = service_state.last_number
        self.keys: dict[str, KeyRecord] = {}
        self.decisions: list[str] = []
        """Lines for the log of decisions."""
        self.num_changes = 0
        """Counter that increases with every change of the transaction."""
        self._before = service_state
        self._new_token = new_token
        self._waiting = dict.fromkeys(service_state.waiting)
        self._held = dict(service_state.held)
        self._touched: dict[int, None] = {}
        self._ends: dict[int, str] = {}
        self._changed_attempts: dict[AttemptName, AttemptRecord] = {}
        self._new_checkpoints: list[CheckpointRecord] = []
        self._events: list[EventRecord] = []

    @property
    def is_changed(self) -> bool:
        """True if the transaction changed anything."""
        return self.state is not self._before.state or bool(self._touched or self._events)

    # ── what commands do ──

    def apply_event(
        self, event: Event, *, state: FleetState | None = None, new_jobs: Sequence[JobRecord] = ()
    ) -> None:
        """Let `step` decide about an event, and record its decisions.

        The event is applied to ``state`` if that is not None, else to the transaction's state.
        """
        before = self.state if state is None else state
        round_number = self.state.round_number
        if isinstance(event, (Submit, Finish, Cancel, TimeOut, Fail)):
            event = replace(event, living=self._living(event))
        self.state, actions = step(before, event)
        self.decisions += [describe_stop(stop) for stop in actions.stops]
        self.decisions += [describe_start(before, self.state, one) for one in actions.starts]
        self.decisions += describe_reserved(before, self.state)
        self.num_changes += 1
        if self.state.round_number != round_number:
            self.note("round", round=int(self.state.round_number))
        for new_job in new_jobs:
            self.last_number = new_job.number
            self.put_job(new_job)
            self.note("submitted", new_job.number, name=new_job.spec.name)
        for stop in actions.stops:
            self._stop(stop)
        for start in actions.starts:
            self._start(start)

    def note(self, kind: str, job: int | None = None, /, **detail: Any) -> None:
        """Record an event for users."""
        self.num_changes += 1
        sequence = self._before.last_sequence + len(self._events) + 1
        self._events.append(
            EventRecord(sequence=sequence, time_s=self.time_s, kind=kind, job=job, detail=detail)
        )

    def version_of(self, record: JobRecord) -> int:
        """Version of a job after this batch so far.

        Of two changes in one batch that expect the same version, the second is therefore refused.
        """
        old = self._before.jobs.get(record.number)
        if old is None or record.number not in self._touched:
            return record.version
        return old.version + int(_is_news(self._as_it_is(record), old))

    def put_job(self, record: JobRecord) -> None:
        """Set the record of a job that has not ended."""
        self.num_changes += 1
        self.jobs[record.number] = record
        self._touched[record.number] = None

    def put_checkpoint(self, record: CheckpointRecord) -> None:
        """Set the newest checkpoint of a job."""
        self.checkpoints[record.job] = record
        self._new_checkpoints.append(record)
        self.note("checkpoint", record.job, attempt=record.attempt, step=record.step)

    def note_told_to_stop(self, attempt: AttemptRecord) -> None:
        """Record that a response is telling an attempt to stop."""
        if not attempt.knows_it_must_leave:
            self._put(replace(attempt, knows_it_must_leave=True))

    def note_that_it_saves(self, number: int) -> None:
        """Record that a job saves its work, so that it may be preempted unless its file forbids
        that.
        """
        if self.jobs[number].spec.preemptible is None:
            self.state = with_preemptible(self.state, number)

    def close_attempt(self, name: AttemptName, outcome: str, exit_code: int | None = None) -> None:
        """Close an attempt that has ended, and free its devices."""
        record = find(self.attempts, name)
        if record is None:
            return
        # The reason of the stop is more informative than the exit code, unless all work was done.
        outcome = outcome if outcome == "finished" else record.outcome or outcome
        self._put(replace(record, ended_s=self.time_s, outcome=outcome, exit_code=exit_code))
        if record.started_s is not None:
            self.note(
                "stopped", name.job, attempt=name.attempt, outcome=outcome, exit_code=exit_code
            )

    def note_end_of_job(self, number: int, why: str) -> None:
        """Remember why a job ended that an event has ended in the scheduler's state.

        Its stored record is ended when its last open attempt has stopped.
        """
        # Attempts that are being stopped for another reason are included, because the next batch
        # reads the reason of the end from them.
        for record in self.attempts.get(number, ()):
            self._put(replace(record, outcome=why))
        self._ends[number] = why
        self._touched[number] = None

    # ── decisions ──

    def _start(self, start: Start) -> None:
        state = self.state
        device_type = state.device_types[
            int(state.type_of_device[state.device_names.index(start.devices[0])])
        ]
        record = AttemptRecord(
            job=start.number,
            attempt=start.attempt,
            devices=start.devices,
            device_type=device_type,
            token=self._new_token(),
            decided_s=self.time_s,
        )
        self._waiting[name_of(record)] = None
        self._put(record)
        job = self.jobs[start.number]
        self.put_job(replace(job, attempt=start.attempt, status="starting"))

    def _stop(self, stop: Stop) -> None:
        if stop.reason in _VERDICTS:
            self._ends[stop.number] = stop.reason
        if stop.reason == "dependency":
            message = "a job that it comes after did not end as it must"
            self.put_job(replace(self.jobs[stop.number], message=message))
        self._touched[stop.number] = None
        name = AttemptName(stop.number, stop.attempt)
        record = find(self.attempts, name)
        if record is None:
            return
        self._put(replace(record, stopping_since_s=self.time_s, outcome=stop.reason))
        if record.started_s is None:
            # The attempt was never started, so there is nothing to wait for.
            self.close_attempt(name, stop.reason)
        else:
            self.note("stopping", stop.number, attempt=stop.attempt, reason=stop.reason)

    def _put(self, record: AttemptRecord) -> None:
        self.num_changes += 1
        name = name_of(record)
        others = [one for one in self.attempts.get(name.job, ()) if one.attempt != name.attempt]
        kept = [*others, record] if record.ended_s is None else others
        if kept:
            self.attempts[name.job] = tuple(sorted(kept, key=lambda one: one.attempt))
        else:
            self.attempts.pop(name.job, None)
        if record.ended_s is not None:
            self._waiting.pop(name, None)
            for device in record.devices:
                left = tuple(one for one in self._held.pop(device, ()) if one != name)
                if left:
                    self._held[device] = left
        self._changed_attempts[name] = record
        self._touched[name.job] = None

    def _start_waiting_attempts(self) -> None:
        """Mark waiting attempts as started whose devices no stopping attempt still holds, and whose
        job runs nowhere else.

        A holder that is not being stopped shares its devices, because the state assigned them to
        both.
        """
        for name in tuple(self._waiting):
            record = find(self.attempts, name)
            assert record is not None, "a waiting attempt is open"
            runs = any(other.started_s is not None for other in self.attempts[name.job])
            if runs or any(self._is_being_left(device) for device in record.devices):
                continue
            del self._waiting[name]
            for device in record.devices:
                self._held[device] = (*self._held.get(device, ()), name)
            self._put(replace(record, started_s=self.time_s))
            self.note(
                "started", name.job,
                attempt=name.attempt, devices=list(record.devices), device_type=record.device_type,
            )  # fmt: skip

    def _is_being_left(self, device: str) -> bool:
        holders = (find(self.attempts, name) for name in self._held.get(device, ()))
        return any(one is not None and one.stopping_since_s is not None for one in holders)

    def _living(self, event: Submit | Finish | Cancel | TimeOut | Fail) -> frozenset[int]:
        """Jobs of an event, or those that its new jobs come after, that have a started attempt."""
        if isinstance(event, Submit):
            numbers = {needed for job in event.jobs for needed, _ in job.after}
        else:
            numbers = {event.number} if isinstance(event, Fail) else {*event.numbers}
        return frozenset(
            number
            for number in numbers
            if any(one.started_s is not None for one in self.attempts.get(number, ()))
        )

    def verdict(self, record: JobRecord) -> JobStatus:
        """Final status of a job that has ended, also while its processes are being stopped."""
        if record.status in ENDED:
            return record.status
        open_attempts = self.attempts.get(record.number, ())
        why = self._ends.get(record.number) or (
            open_attempts[-1].outcome if open_attempts else self._why_closed(record.number)
        )
        return _VERDICTS[why]

    def _let_successors_start(self) -> None:
        """Unblock the jobs that come after jobs whose last attempt closed in this batch."""
        touched = np.array(list(self._touched), dtype=np.int64)
        needed = touched[np.isin(touched, self.state.dependencies[:, 1])]
        for number in needed.tolist():
            if number not in self.attempts and phase_of(self.state, number) == STATE_ENDED:
                why = self._ends.get(number) or self._why_closed(number)
                self.apply_event(Leave(time_s=self.time_s, number=number, reason=why))
        before, now = self._before.state.dependencies, self.state.dependencies
        if before is not now:
            # Unblocked jobs that do not start at once are queued from now on.
            unblocked = np.setdiff1d(before[:, 0], now[:, 0]).tolist()
            self._touched.update((number, None) for number in unblocked if number in self.jobs)

    # ── the end of the batch ──

    def finish(self) -> tuple[ServiceState, Batch]:
        """The state after this batch, and the rows to store."""
        self._let_successors_start()
        self._start_waiting_attempts()
        changed = [record for number in self._touched if (record := self._refreshed(number))]
        before = self._before
        service_state = ServiceState(
            state=self.state,
            jobs=self.jobs,
            attempts=self.attempts,
            waiting=tuple(self._waiting),
            held=self._held,
            checkpoints=self.checkpoints,
            last_number=self.last_number,
            last_sequence=before.last_sequence + len(self._events),
        )
        batch = Batch(
            state=self.state,
            jobs=changed,
            attempts=list(self._changed_attempts.values()),
            checkpoints=self._new_checkpoints,
            events=self._events,
            keys=list(self.keys.values()),
            first_new_number=before.last_number + 1,
        )
        return service_state, batch

    def _refreshed(self, number: int) -> JobRecord | None:
        """The current record of a job; None if it has not changed."""
        record = self._as_it_is(self.jobs[number])
        old = self._before.jobs.get(number)
        if record == old:
            return None
        if old is not None and _is_news(record, old):
            record = replace(record, version=old.version + 1)
        if record.status in ENDED:
            record = replace(record, ended_s=self.time_s)
            self.note(record.status, number, message=record.message)
            del self.jobs[number]
            self.checkpoints.pop(number, None)
        else:
            self.jobs[number] = record
        return record

    def _as_it_is(self, record: JobRecord) -> JobRecord:
        open_attempts = self.attempts.get(record.number, ())
        newest = open_attempts[-1] if open_attempts else None
        if newest is not None and record.started_s is None and newest.started_s is not None:
            record = replace(record, started_s=newest.started_s)
        return replace(
            record,
            status=self._status(record, newest),
            devices=() if newest is None else newest.devices,
        )

    def _status(self, record: JobRecord, newest: AttemptRecord | None) -> JobStatus:
        phase = phase_of(self.state, record.number)
        if phase == RUNNING:
            return "running" if record.status == "running" else "starting"
        if newest is not None:
            return "stopping"
        if phase == STATE_ENDED:
            return self.verdict(record)
        if phase == BLOCKED:
            return "blocked"
        return "paused" if phase == PAUSED else "queued"

    def _why_closed(self, number: int) -> str:
        """Reason why a job ended in an earlier batch; stored with its attempts until the last one
        closes.
        """
        changed = (one for name, one in self._changed_attempts.items() if name.job == number)
        attempt = next(changed, None)
        assert attempt is not None, f"job {number} ended before, with no attempt to close"
        return attempt.outcome


def _is_news(record: JobRecord, old: JobRecord) -> bool:
    """True if a record differs from the old one in more than its progress."""
    return replace(record, done_steps=old.done_steps, version=old.version) != old
