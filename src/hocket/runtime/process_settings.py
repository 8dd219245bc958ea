"""Context managers that set the number of PyTorch's CPU threads and defer garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Use ``count`` threads inside the context; None leaves the number unchanged."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Python's garbage collection, deferred while a step runs.
#
# A step with many blocks creates tens of thousands of small objects, so that Python would search
# all objects for cycles every few steps, and launch no kernel meanwhile. Reference cycles of a step
# are collected when it ends: otherwise a model with tensors in cycles would hold tensors of several
# steps, and more than in its dry run.


@contextmanager
def deferred_gc() -> Iterator[None]:
    """Disable collection inside the context; afterwards collect the youngest generation.

    If collection was disabled before, nothing is collected.
    """
    was_wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_wanted:
            gc.enable()
            gc.collect(0)
