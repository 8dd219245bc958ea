"""Python's garbage collection, deferred while a step runs.

A step of many blocks makes tens of thousands of small objects, so that Python would search all
objects for cycles every few steps, and launch no kernel meanwhile. What a step itself leaves in
cycles is collected when it ends: a model that holds tensors in cycles would hold those of several
steps, and more than in its dry run.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_gc() -> Iterator[None]:
    """Disable collection inside; at the end collect what is young, if it was enabled before."""
    was_wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_wanted:
            gc.enable()
            gc.collect(0)
