"""When waiting jobs are expected to start, worked out once per change of the fleet.

A forecast of a large fleet takes some tenths of a second of a core that rounds need too. So only
one runs at a time, and all who look at the page between two changes see the same one.
"""

from __future__ import annotations

import threading

from hocket.fleet.forecast import Forecast, affordable_events, affordable_grain_s, forecast
from hocket.fleet.rounds.state import WAITING, State

_BUSY_PART = 3
"""The queue of a page gets this part of the work that an explanation is worth."""


class Foresight:
    """The newest forecast; safe to ask from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: object = None
        self._newest: Forecast | None = None

    def of(self, state: State) -> Forecast | None:
        """A forecast of the starts; that of a moment ago while another is being made."""
        rows = state.jobs.rows
        waiting = rows["number"][rows["phase"] == WAITING]
        if not len(waiting):
            return None
        key = (state.round_number, waiting.tobytes(), state.is_up.tobytes())
        if self._lock.acquire(blocking=self._newest is None):
            try:
                if key != self._key:
                    self._newest = _look(state, waiting.tolist())
                    self._key = key
            finally:
                self._lock.release()
        return self._newest


def _look(state: State, waiting: list[int]) -> Forecast:
    return forecast(
        state,
        until_started=waiting,
        grain_s=affordable_grain_s(state),
        max_events=max(affordable_events(state) // _BUSY_PART, 20),
    )
