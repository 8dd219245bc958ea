"""Python's search for cycles of objects that nobody reaches, put off while a step runs.

A step of many blocks makes ten thousands of small objects, so that Python looks through all that
there are every few steps, and starts no kernel meanwhile. Between steps it may. What a step itself
has left in cycles is searched for when it ends: a model that holds tensors in them would hold those
of several steps, and more than its step was rehearsed to hold.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_gc() -> Iterator[None]:
    """No search inside, and one among what was made there at the end; where none was wanted before,
    none is wanted after."""
    was_wanted = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_wanted:
            gc.enable()
            gc.collect(0)
