"""A Ray of this machine, for the tests of a file."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import ray


@contextmanager
def local_ray() -> Iterator[None]:
    """Start Ray in this process and end it, also its handler of SIGTERM, which ends the process."""
    before = signal.getsignal(signal.SIGTERM)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        yield
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, before)
