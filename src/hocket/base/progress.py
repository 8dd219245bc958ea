"""Progress lines in Python programs for work that takes longer than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_S = 2.0
"""Work that ends within this time prints nothing."""


class Progress:
    """Print a line for each stage that starts, or is still running, after `QUIET_S`."""

    def __init__(self, title: str) -> None:
        self._title, self._stage, self._is_shown = title, "", True
        self._started_s = time.perf_counter()
        self._lock = threading.Lock()

    def stage(self, name: str) -> None:
        """Start another stage of the work."""
        with self._lock:
            self._stage, self._is_shown = name, False
        if time.perf_counter() - self._started_s >= QUIET_S:
            self._show()

    def _show(self) -> None:
        with self._lock:
            if self._is_shown:
                return
            self._is_shown = True
            seconds = time.perf_counter() - self._started_s
            sys.stderr.write(f"{self._title}: {self._stage} ({seconds:.0f} s)\n")
            sys.stderr.flush()


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Context manager around work with stages; yields its `Progress`."""
    found = Progress(title)
    # The timer prints the stage that runs when QUIET_S has passed; later stages print themselves.
    timer = threading.Timer(QUIET_S, found._show)
    timer.daemon = True
    timer.start()
    try:
        yield found
    finally:
        timer.cancel()
