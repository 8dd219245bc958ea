"""Compile kernels with numba: the form that Python calls and the form that other kernels inline.

Importing this module imports numba, which takes half a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from hocket.kernels.dependencies import SourceFunction, digest
from hocket.kernels.flat import flat, unpacking
from hocket.kernels.numba_internals import (
    EntryCompiler,
    InnerCompiler,
    KernelCache,
    pass_tuples_whole,
)

_njit: Any = numba.njit
"""``numba.njit`` without its type hints, which omit some of the options used here."""
pass_tuples_whole()


def compile_entry(source: SourceFunction) -> tuple[Any, Callable[..., Any]]:
    """Return the dispatcher of a kernel's entry, and the function that Python calls in its place.

    The entry is compiled at the first call with each combination of argument types, not here.
    """
    flattened = flat(source)
    entry = _njit(**_options(source))(flattened.function)
    # The compiler's own cache looks only at the file of the function itself.
    entry._cache = KernelCache(source, digest(flattened))
    return entry, unpacking(source, entry)


def compile_inner(source: SourceFunction) -> Any:
    """Return the form of a kernel that other kernels call: without the wrappers for Python and C.

    For a function with many array arguments these wrappers take half of the compile time.
    """
    options = {
        **_options(source), "no_cpython_wrapper": True, "forceinline": True,
        "pipeline_class": InnerCompiler,
    }  # fmt: skip
    return _njit(**options)(source.function)


def _options(source: SourceFunction) -> dict[str, Any]:
    # Where the caller owns every array and compiled code makes none, references to them (which the
    # compiler counts at each call) need no counting; without it the simulator runs ten times as
    # fast.
    return {
        "error_model": "numpy", "nogil": True, "_nrt": source.allocates, "no_cfunc_wrapper": True,
        "pipeline_class": EntryCompiler,
    }  # fmt: skip
