"""Time of the service: seconds since 1970 that never decrease, even if the system clock is set."""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    """Monotonic clock that starts at the wall-clock time, or at the last stored time if later."""

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
        """Current time; never less than a value returned before, to any thread."""
        # Rounding of the offset could put the first moment before the stored one.
        return max(self._not_before_s, self._offset_s + self._monotonic_s())
