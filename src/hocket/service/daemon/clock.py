"""Time of the service: seconds since 1970 that never go back, whatever is done to the clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Anchored once at the wall clock, or at the last stored moment where that is later; from
    there on it counts with the monotonic clock, which nobody sets."""

    def __init__(
        self,
        not_before_s: float = 0.0,
        *,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic_s = monotonic_s
        self._offset_s = max(wall_s(), not_before_s) - monotonic_s()
        self._not_before_s = not_before_s

    def now_s(self) -> float:
        """Now; never less than what it said before, to any thread."""
        # The offset is rounded, so that the first moment could lie before the stored one.
        return max(self._not_before_s, self._offset_s + self._monotonic_s())
