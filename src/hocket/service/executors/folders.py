"""Base of executors that read the outcome of an attempt from its folder."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path

from hocket.service.executors.attempt_folder import asked_grace_s
from hocket.service.executors.attempts import Attempts, looked_at
from hocket.service.executors.executor import AttemptName, Status


class FolderExecutor(ABC):
    """An `Executor` over folders of attempts, with deadlines by which attempts must have ended."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._deadline_s: dict[AttemptName, float] = {}

    @abstractmethod
    def stop(self, name: AttemptName, grace_s: float) -> None:
        """End an attempt within ``grace_s``; one that has not begun never will."""

    @abstractmethod
    def _look_at(self, name: AttemptName, folder: Path) -> Status:
        """Status of an attempt whose folder exists."""

    def kill(self, name: AttemptName) -> None:
        """End an attempt now."""
        self.stop(name, 0.0)

    def forget(self, name: AttemptName) -> None:
        """Remove the folder of an attempt that ended; its name stays refused."""
        self._deadline_s.pop(name, None)
        self._attempts.forget(name, self._status(name))

    def _status(self, name: AttemptName) -> Status | None:
        folder = self._attempts.path(name)
        return looked_at(name, folder, lambda: self._look_at(name, folder))

    def _end_within(self, name: AttemptName, span_s: float) -> None:
        """Set the deadline of an attempt to ``span_s`` from now, unless an earlier one is set."""
        deadline_s = time.monotonic() + span_s
        self._deadline_s[name] = min(self._deadline_s.get(name, deadline_s), deadline_s)

    def _outlived_grace(self, name: AttemptName, folder: Path, delay_s: float) -> bool:
        """True if an attempt was asked to stop and outlived its grace by ``delay_s``."""
        grace_s = asked_grace_s(folder)
        return grace_s is not None and self._is_past_deadline(name, grace_s + delay_s)

    def _is_past_deadline(self, name: AttemptName, span_s: float) -> bool:
        """True if the deadline of an attempt has passed; without a deadline, one is set ``span_s``
        from now.
        """
        now_s = time.monotonic()
        return now_s >= self._deadline_s.setdefault(name, now_s + span_s)
