"""How the engine's functions are compiled, and where the result is kept."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit

_SOURCES = (
    "compiled.py",
    "containers.py",
    "flow.py",
    "kernel.py",
    "memory.py",
    "state.py",
    "tables.py",
)
# The caller owns every array and the engine makes none, so counting references to them (which
# numba does at each call) is not needed; without it the engine runs ten times as fast.
_OPTIONS: dict[str, Any] = {"error_model": "numpy", "_nrt": False}
_F = TypeVar("_F", bound=Callable[..., Any])


def compiled(function: _F) -> _F:
    """A function that only other compiled functions call."""
    return cast(_F, njit(**_OPTIONS)(function))


def compiled_entry(function: _F) -> _F:
    """A function that Python calls, kept on disk together with all that it calls.

    The compiler notices changes only in the file of the function itself, so the name under which it
    is kept carries a digest of the sources of all of them.
    """
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(name).read_bytes())
    function.__qualname__ = f"{function.__name__}_{digest.hexdigest()[:12]}"
    return cast(_F, njit(cache=True, **_OPTIONS)(function))


def is_compiled(entry: Any) -> bool:
    """Whether an entry's compiled form is there, in this process or on disk."""
    if entry.signatures:
        return True
    folder = entry.stats.cache_path
    return folder is not None and any(Path(folder).glob(f"*{entry.py_func.__qualname__}*.nbc"))
