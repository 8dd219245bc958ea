"""Other processes at work while ops are timed, as where several share one processor.

What a process has of the memory's bandwidth, the caches and the clock is less while others work.
Each of the others multiplies matrices and copies memory, in turns of about the same length.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hocket.base import config
from hocket.hardware.detect import usable_cores
from hocket.processes.start import start_module


@contextmanager
def sharing_cores(num_processes: int) -> Iterator[None]:
    """This process is one of so many that share the cores, and the others are at work."""
    if num_processes == 1:
        yield
        return
    threads, before = max(1, usable_cores() // num_processes), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ExitStack() as others:
            for _ in range(num_processes - 1):
                others.enter_context(_at_work(threads))
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _at_work(threads: int) -> Iterator[None]:
    """A process that works; it ends with this one, however that ends."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    child = start_module(
        "hocket.cost.at_work", stdin=subprocess.PIPE, output=subprocess.PIPE,
        errors=subprocess.DEVNULL,
        environment={**config.environment_anywhere(), **dict.fromkeys(names, str(threads))},
    )  # fmt: skip
    with child:
        try:
            assert child.stdout is not None
            child.stdout.readline()  # it has begun, or ended
            yield
        finally:
            child.kill()
