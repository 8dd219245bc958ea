"""Python's garbage collection, deferred while a step runs.

A step with many blocks creates tens of thousands of small objects, so that Python would search all
objects for cycles every few steps, and launch no kernel meanwhile. Reference cycles of a step are
collected when it ends: otherwise a model with tensors in cycles would hold tensors of several
steps, and more than in its dry run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
