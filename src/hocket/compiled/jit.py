"""How functions are compiled, and where the result is kept. Importing this takes half a second."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

# The caller owns every array and compiled code makes none, so counting references to them (which
# numba does at each call) is not needed; without it the simulator runs ten times as fast.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
# Wrappers with which Python and C would call a function: where it takes many arrays they are half
# of the compile time.
_NOT_FROM_C: dict[str, Any] = {**_OPTIONS, "no_cfunc_wrapper": True}
_INTERNAL: dict[str, Any] = {**_NOT_FROM_C, "no_cpython_wrapper": True}
_CONTAINERS = ("hocket.compiled.containers", "hocket.compiled.heaps")
_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """A function that only other compiled functions call: Python cannot."""
    return cast(_F, njit(**_INTERNAL)(function))


def compiled_entry(*modules: str) -> Callable[[_F], _F]:
    """A function that Python calls, kept on disk together with all that it calls.

    The compiler notices changes only in the file of the function itself, so the name under which it
    is kept carries a digest of the sources of all of them: its own module, ``modules`` (those that
    it has compiled functions or tuples from) and this room.
    """

    def keep(function: _F) -> _F:
        digest = hashlib.sha256()
        for name in sorted({function.__module__, *modules, __name__, *_CONTAINERS}):
            source = sys.modules[name].__file__ if name in sys.modules else None
            if source is not None:
                digest.update(Path(source).read_bytes())
        function.__qualname__ = f"{function.__name__}_{digest.hexdigest()[:12]}"
        return cast(_F, njit(cache=True, **_NOT_FROM_C)(function))

    return keep


def is_compiled(entry: Any) -> bool:
    """Whether an entry's compiled form is there, in this process or on disk."""
    if entry.signatures:
        return True
    folder = entry.stats.cache_path
    return folder is not None and any(Path(folder).glob(f"*{entry.py_func.__qualname__}*.nbc"))
