"""Makes what runs equal to what was committed, by comparing both repeatedly.

There is no list of pending orders, which a crash would lose. Each pass compares the committed state
with the executor's report and does what is missing. So a restart needs no special handling,
repeating an action is harmless (an attempt's name makes ``start`` idempotent), and an outcome that
could not be stored is seen again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hocket.base.errors import HocketError
from hocket.service.daemon import observations
from hocket.service.daemon.assignment import assignment_of
from hocket.service.daemon.decider import Command
from hocket.service.daemon.service_state import ServiceState, name_of, types_up
from hocket.service.executors.executor import (
    EXITED,
    LOST,
    RUNNING,
    AttemptName,
    Executor,
    Phase,
    Poll,
    Status,
)
from hocket.service.records import AttemptRecord
from hocket.service.server_config import ServerConfig

Item = TypeVar("Item")

MAX_START_TRIES = 5
"""Number of refused starts after which an attempt is reported as unable to start."""
START_AGAIN_S = 1.0
"""Seconds before the second try to start; doubled for each further try."""
KILL_AFTER_S = 10.0
"""Seconds after its grace at which the reconciler kills an attempt that its executor did not end.
"""


class _Refusal(NamedTuple):
    why: str
    again_s: float
    """Time of the next try."""


class Reconciler:
    """Talks to the executor; one thread at a time may call `look` and `apply`."""

    def __init__(
        self,
        executor: Executor,
        folder: Path,
        *,
        service_state: Callable[[], ServiceState],
        report: Callable[[Command], Future[Any]],
        now_s: Callable[[], float],
        heard_s: Callable[[AttemptName], float],
        endpoint_url: str = "",
        config: ServerConfig | None = None,
    ) -> None:
        self.trouble: str = ""
        """Last error of the executor; empty once it works again."""
        self.servers: dict[str, str] = {}
        """Server of each device that was ever seen."""
        self._executor = executor
        self._service_state = service_state
        self._send = report
        self._now_s = now_s
        self._folder = folder
        self._endpoint_url = endpoint_url
        self._config = config
        self._known: set[AttemptName] = set()
        """Attempts that the executor is known to have."""
        self._asked_to_stop: dict[AttemptName, int] = {}
        """Attempts that were asked to stop, with the number of the poll before that."""
        self._num_looks = 0
        self._heard_s = heard_s
        self._running_since_s: dict[AttemptName, float] = {}
        """Time at which attempts were first seen running; an attempt in its engine's queue cannot
        report.
        """
        self._refusals: dict[AttemptName, list[_Refusal]] = {}
        """Errors of each attempt that could not be started, one per try."""
        self._unknown_types: set[str] = set()
        """Unknown device types of devices that exist but cannot be used."""
        self._pending: dict[object, Future[Any]] = {}
        """Reports that are not decided yet, so that none is sent twice."""
        self._is_refused = False
        """True if a report could not be decided."""

    def look(self) -> None:
        """Poll the executor, report changes, then start and stop attempts as committed."""
        try:
            poll = self._executor.poll()
        except HocketError as error:
            self.trouble = str(error)
            return
        self.trouble = ""
        self._num_looks += 1
        self._forget_decided()
        self._known = {status.name for status in poll.attempts}
        # Devices first: an attempt that was lost with its device is no failure of the job.
        self._report_devices(poll)
        self._report_attempts(poll)
        service_state = self._service_state()
        for memory in (self._refusals, self._asked_to_stop, self._running_since_s):
            for name in [name for name in memory if service_state.attempt(name) is None]:
                del memory[name]
        self._report_silence(service_state)
        self.apply(name_of(record) for record in service_state.open_attempts())

    def apply(self, names: Iterable[AttemptName]) -> None:
        """Start and stop attempts according to the committed state."""
        if not self._num_looks:
            # Before the first poll it is unknown which attempts run already.
            return
        service_state = self._service_state()
        # Stops first, because they take longest.
        records = [record for name in names if (record := service_state.attempt(name)) is not None]
        for record in sorted(records, key=lambda record: record.stopping_since_s is None):
            if record.started_s is None:
                continue
            if record.stopping_since_s is not None:
                self._stop(service_state, record, record.stopping_since_s)
            elif name_of(record) not in self._known:
                self._start(service_state, record)

    # ── orders to the executor ──

    def _start(self, service_state: ServiceState, record: AttemptRecord) -> None:
        name, now_s = name_of(record), self._now_s()
        refusals = self._refusals.get(name, [])
        if len(refusals) >= MAX_START_TRIES:
            self._fence(name, LOST, refusals[-1].why)
            return
        if refusals and now_s < refusals[-1].again_s:
            self.trouble = refusals[-1].why
            return
        try:
            assignment = assignment_of(
                service_state, record, self._folder, self._endpoint_url, self._config
            )
            self._executor.start(assignment)
        except (HocketError, OSError) as error:
            self.trouble = str(error)
            again_s = now_s + START_AGAIN_S * 2.0 ** len(refusals)
            self._refusals[name] = [*refusals, _Refusal(str(error), again_s)]
        else:
            self._known.add(name)

    def _stop(self, service_state: ServiceState, record: AttemptRecord, since_s: float) -> None:
        name, now_s = name_of(record), self._now_s()
        ends_s = since_s + service_state.jobs[record.job].spec.grace_s
        # An attempt that reported that it has finished may use its grace to clean up.
        is_due = record.outcome != "finished" or now_s >= ends_s
        if name not in self._known:
            self._fence(name, EXITED, "it never started")
        elif now_s > ends_s + KILL_AFTER_S:
            self._try(partial(self._executor.kill, name))
        elif (
            is_due
            and name not in self._asked_to_stop
            and self._try(partial(self._executor.stop, name, max(ends_s - now_s, 0.0)))
        ):
            self._asked_to_stop[name] = self._num_looks

    def _fence(self, name: AttemptName, phase: Phase, detail: str) -> None:
        """Ensure that an attempt unknown to the executor never starts.

        It is over when a later poll has not found it either.
        """
        if self._asked_to_stop.get(name, self._num_looks) < self._num_looks:
            status = Status(name=name, phase=phase, detail=detail)
            self._report(name, partial(observations.ended, statuses=[status]))
        elif name not in self._asked_to_stop and self._try(partial(self._executor.kill, name)):
            self._asked_to_stop[name] = self._num_looks

    def _try(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except HocketError as error:
            self.trouble = str(error)
            return False
        return True

    # ── reports of the executor ──

    def _report_devices(self, poll: Poll) -> None:
        self.servers.update({device.name: device.server for device in poll.devices})
        state = self._service_state().state
        known = tuple(device for device in poll.devices if device.device_type in state.device_types)
        if types_up(state) != {device.name: device.device_type for device in known}:
            self._report("devices", partial(observations.see_devices, devices=known))
        unknown = {device.device_type for device in poll.devices} - set(state.device_types)
        if unknown:
            device_types = ", ".join(map(repr, sorted(unknown)))
            self.trouble = f"devices of type {device_types} came and are not used before a restart"
        if new := unknown - self._unknown_types:
            self._report(
                "device_types", partial(observations.see_unknown_types, device_types=sorted(new))
            )
        self._unknown_types = unknown

    def _report_attempts(self, poll: Poll) -> None:
        service_state, devices = self._service_state(), {device.name for device in poll.devices}
        begun: list[AttemptName] = []
        ended: list[Status] = []
        for status in poll.attempts:
            name, record = status.name, service_state.attempt(status.name)
            if status.phase == RUNNING:
                self._running_since_s.setdefault(name, self._now_s())
            is_over = status.phase in (EXITED, LOST)
            if record is None:
                self._try(partial(self._executor.forget if is_over else self._executor.kill, name))
            elif name in self._pending:
                continue
            elif is_over and (
                status.exit_code == 0
                or record.stopping_since_s is not None
                or not devices.issuperset(record.devices)
            ):
                ended.append(status)
            elif is_over:
                # A failure is a decision of its own, because it may end the job.
                self._report(name, partial(observations.ended, statuses=[status]))
            elif (
                status.phase == RUNNING
                and record.stopping_since_s is None
                and service_state.jobs[name.job].status == "starting"
            ):
                begun.append(name)
        for names in self._together(begun):
            self._report_all(names, partial(observations.begun, names=names))
        for some in self._together(ended):
            names = [status.name for status in some]
            self._report_all(names, partial(observations.ended, statuses=some))

    def _together(self, items: list[Item]) -> list[list[Item]]:
        """Group reports into commands, which cost hardly more than single reports.

        Normally one command for all. After a refusal one command each, so that a report that cannot
        be executed delays no other.
        """
        if self._is_refused:
            return [[item] for item in items]
        return [items] if items else []

    def _report_silence(self, service_state: ServiceState) -> None:
        now_s = self._now_s()
        for record in service_state.open_attempts():
            name = name_of(record)
            silence_s = service_state.jobs[record.job].spec.silence_s
            since_s = self._running_since_s.get(name)
            if silence_s is None or since_s is None or record.stopping_since_s is not None:
                continue
            if now_s - max(since_s, self._heard_s(name)) > silence_s:
                self._report(name, partial(observations.silent, name=name, silence_s=silence_s))

    def _forget_decided(self) -> None:
        """Drop decided reports; a failed one is seen and sent again."""
        decided = {what: future for what, future in self._pending.items() if future.done()}
        self._is_refused = False
        for what, future in decided.items():
            del self._pending[what]
            if future.exception() is not None:
                self._is_refused = True
                self.trouble = str(future.exception())

    def _report(self, what: object, command: Command) -> None:
        if what not in self._pending:
            self._report_all([what], command)

    def _report_all(self, what: Sequence[object], command: Command) -> None:
        future = self._send(command)
        self._pending.update(dict.fromkeys(what, future))
