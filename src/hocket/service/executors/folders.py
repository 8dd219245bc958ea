"""Base of executors that read the outcome of an attempt from its folder."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path

from hocket.service.executors.attempts import Attempts, looked_at
from hocket.service.executors.executor import AttemptName, Status


class FolderExecutor(ABC):
    """An `Executor` over folders of attempts, with moments by which attempts must have ended."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._deadline_s: dict[AttemptName, float] = {}

    @abstractmethod
    def stop(self, name: AttemptName, grace_s: float) -> None:
        """Have an attempt ended; one that has not begun never will."""

    @abstractmethod
    def _look_at(self, name: AttemptName, folder: Path) -> Status:
        """Status of an attempt whose folder is there."""

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
        """An attempt must have ended so long from now; a sooner moment that was set stands."""
        deadline_s = time.monotonic() + span_s
        self._deadline_s[name] = min(self._deadline_s.get(name, deadline_s), deadline_s)

    def _is_late(self, name: AttemptName, span_s: float) -> bool:
        """True if an attempt's moment has passed; where none was set, it is so long from now."""
        now_s = time.monotonic()
        return now_s >= self._deadline_s.setdefault(name, now_s + span_s)
