"""Other processes at work while ops are timed, as where several share one processor.

What a process has of the memory's bandwidth, the caches and the clock is less while others work.
Processes that share out a step well do alike work at the same time: matrices are multiplied while
others multiply, parameters are updated while others stream through memory, too. So the others
multiply matrices while an op that computes is timed, and copy memory while one that moves bytes is.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from hocket.base import config
from hocket.cost.at_work import COMPUTE, STREAM
from hocket.hardware.detect import usable_cores
from hocket.processes.start import start_module


class Neighbours:
    """The other processes: what they do can be chosen."""

    def __init__(self, children: list[subprocess.Popen[bytes]]) -> None:
        self._children = children

    def do(self, *, stream: bool) -> None:
        """From now on stream memory, or compute."""
        for child in self._children:
            assert child.stdin is not None
            # One that somebody killed is not there to be told.
            with suppress(BrokenPipeError):
                os.write(child.stdin.fileno(), STREAM if stream else COMPUTE)


@contextmanager
def sharing_cores(num_processes: int) -> Iterator[Neighbours]:
    """This process is one of so many that share the cores, and the others are at work."""
    if num_processes == 1:
        yield Neighbours([])
        return
    threads, before = max(1, usable_cores() // num_processes), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with ExitStack() as others:
            children = [others.enter_context(_at_work(threads)) for _ in range(num_processes - 1)]
            yield Neighbours(children)
    finally:
        torch.set_num_threads(before)


@contextmanager
def _at_work(threads: int) -> Iterator[subprocess.Popen[bytes]]:
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
            yield child
        finally:
            child.kill()
