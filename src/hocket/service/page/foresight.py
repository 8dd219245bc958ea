"""When waiting jobs are expected to start, worked out once per change of the fleet.

All who look at the page between two changes see the same forecast, and whoever looks while the next
one is being made sees the last.
"""

from __future__ import annotations

import threading

from hocket.fleet.forecast import Forecast
from hocket.fleet.rounds.state import WAITING, FleetState
from hocket.service.errors import UnavailableError
from hocket.service.outlook.outlook import FleetOutlook, HereOutlook


class Foresight:
    """The newest forecast; safe to ask from several threads."""

    def __init__(self, outlook: FleetOutlook | None = None) -> None:
        self._outlook = outlook or HereOutlook()
        self._lock = threading.Lock()
        self._key: object = None
        self._newest: Forecast | None = None

    def of(self, state: FleetState) -> Forecast | None:
        """A forecast of the starts; that of a moment ago while another is being made, and None
        where there is none yet or nobody waits."""
        rows = state.jobs.rows
        waiting = rows["number"][rows["phase"] == WAITING]
        if not len(waiting):
            return None
        key = (state.round_number, waiting.tobytes(), state.is_up.tobytes())
        if key != self._key and self._lock.acquire(blocking=self._newest is None):
            try:
                if key != self._key:
                    self._newest = self._outlook.starts(state, state.time_s, waiting.tolist())
                    self._key = key
            except UnavailableError:
                # The page does without, or with an older one.
                pass
            finally:
                self._lock.release()
        return self._newest
