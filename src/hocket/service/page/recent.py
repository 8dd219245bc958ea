"""Recent history, followed through the daemon's events: attempts to draw, jobs that ended.

Events are read once, from where the last look ended, and only attempts that began before the first
of them are asked for one by one. Both lists are bounded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from hocket.base.errors import HocketError
from hocket.fleet.rounds.state import RUNNING, FleetState
from hocket.service.executors.executor import AttemptName
from hocket.service.records import ENDED, AttemptRecord, EventRecord, JobRecord

if TYPE_CHECKING:
    from hocket.service.daemon.daemon import Daemon

MAX_ATTEMPTS = 4_000
MAX_ENDED = 15
_FIRST_EVENTS = 5_000
_EVENTS_AT_ONCE = 1_000


@dataclass(frozen=True, kw_only=True)
class Lately:
    """Recent attempts and ended jobs."""

    attempts: tuple[AttemptRecord, ...] = ()
    ended: tuple[JobRecord, ...] = ()
    """Jobs, the one that ended last first."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Of the jobs of the attempts, also of those that ended."""


class Recent:
    """Attempts and ended jobs of the last while; safe to ask from several threads."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._attempts: dict[AttemptName, AttemptRecord] = {}
        self._ended: deque[JobRecord] = deque(maxlen=MAX_ENDED)
        self._names: dict[int, str] = {}
        self._last: int | None = None
        self._lock = threading.Lock()

    def look(self, state: FleetState, since_s: float) -> Lately:
        """Attempts that were open since a moment, and the jobs that ended last."""
        with self._lock:
            self._read_events()
            self._find_running(state)
            self._forget(since_s)
            self._name(state)
            return Lately(
                attempts=tuple(self._attempts.values()),
                ended=tuple(self._ended),
                names=self._names,
            )

    def _read_events(self) -> None:
        if self._last is None:
            self._last = max(self._daemon.last_event() - _FIRST_EVENTS, 0)
        while events := self._daemon.events(self._last, _EVENTS_AT_ONCE):
            for event in events:
                self._take(event)
            self._last = events[-1].sequence

    def _take(self, event: EventRecord) -> None:
        if event.job is None:
            return
        if event.kind in ENDED:
            record = self._record(event.job)
            self._ended.extendleft([record] if record else [])
        elif event.kind == "started":
            name = AttemptName(event.job, int(event.detail["attempt"]))
            self._attempts[name] = AttemptRecord(
                job=name.job,
                attempt=name.attempt,
                devices=tuple(event.detail["devices"]),
                kind="",
                token="",
                decided_s=event.time_s,
                started_s=event.time_s,
            )
        elif event.kind in ("stopping", "stopped"):
            name = AttemptName(event.job, int(event.detail["attempt"]))
            self._stop(name, event)

    def _stop(self, name: AttemptName, event: EventRecord) -> None:
        known = self._attempts.get(name) or self._asked(name)
        if known is None:
            return
        if event.kind == "stopping":
            self._attempts[name] = replace(known, stopping_since_s=event.time_s)
        else:
            outcome = str(event.detail.get("outcome") or "")
            self._attempts[name] = replace(known, ended_s=event.time_s, outcome=outcome)

    def _find_running(self, state: FleetState) -> None:
        """Attempts that began before the first event that was read."""
        rows = state.jobs.rows
        runs = np.flatnonzero(rows["phase"] == RUNNING)
        numbers, attempts = rows["number"][runs].tolist(), rows["attempt"][runs].tolist()
        for name in map(AttemptName, numbers, attempts):
            if name not in self._attempts and (found := self._asked(name)) is not None:
                self._attempts[name] = found

    def _asked(self, name: AttemptName) -> AttemptRecord | None:
        try:
            records = self._daemon.attempts(name.job)
        except HocketError:
            return None
        found = [record for record in records if record.attempt == name.attempt]
        return found[0] if found else None

    def _record(self, number: int) -> JobRecord | None:
        try:
            return self._daemon.job(number)
        except HocketError:
            return None

    def _name(self, state: FleetState) -> None:
        before, self._names = self._names, {}
        for number in {name.job for name in self._attempts}:
            known = state.names.get(number) or before.get(number)
            if known is None:
                record = self._record(number)
                known = record.spec.name if record else ""
            self._names[number] = known

    def _forget(self, since_s: float) -> None:
        kept = {
            name: record
            for name, record in self._attempts.items()
            if record.ended_s is None or record.ended_s > since_s
        }
        if len(kept) > MAX_ATTEMPTS:
            newest = sorted(kept, key=lambda name: kept[name].ended_s or np.inf)[-MAX_ATTEMPTS:]
            kept = {name: kept[name] for name in newest}
        self._attempts = kept
