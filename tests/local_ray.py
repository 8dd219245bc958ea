"""A Ray of this machine, for the tests of a file."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import ray


def _start(attempts: int) -> None:
    """Ray gives its own processes 30 s to start, which a busy machine may need more than once."""
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    except Exception as error:
        ray.shutdown()
        if attempts == 1 or "timed out during startup" not in str(error):
            raise
        _start(attempts - 1)


@contextmanager
def local_ray() -> Iterator[None]:
    """Start Ray in this process and end it, also its handler of SIGTERM, which ends the process."""
    before = signal.getsignal(signal.SIGTERM)
    _start(attempts=5)
    try:
        yield
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)
