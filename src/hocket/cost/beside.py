"""Other processes at work while ops are timed, as where several share one processor.

What a process has of the memory's bandwidth, the caches and the clock is less while others work.
Each of the others multiplies matrices and copies memory, in turns of about the same length.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hocket.hardware.detect import usable_cores

_WORK = """
import os, sys, threading
import numpy as np

def end_with_the_other():
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=end_with_the_other, daemon=True).start()
left = np.ones((512, 512), np.float32)
product = np.empty_like(left)
source = np.ones(2**22, np.float32)
target = np.empty_like(source)
print(flush=True)
while True:
    np.matmul(left, left, out=product)
    np.copyto(target, source)
"""


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
    child = subprocess.Popen(
        (sys.executable, "-P", "-c", _WORK), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **dict.fromkeys(names, str(threads))},
    )  # fmt: skip
    with child:
        try:
            assert child.stdout is not None
            child.stdout.readline()  # it has begun, or ended
            yield
        finally:
            child.kill()
