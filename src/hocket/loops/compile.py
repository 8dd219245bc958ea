"""Compile generated kernels, and cache them on disk by the digest of their source and options.

The source that runs is always generated in this process from the user's function. The cache folder
contains compiled code only. An entry that cannot be used is compiled again.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from hocket.kernels.dependencies import SourceFunction

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class CompileOptions:
    """Compile options of a kernel."""

    fastmath: bool = False
    """True if sums may be reassociated, which is faster but changes bits of the result."""
    boundscheck: bool = True


@lru_cache(maxsize=256)
def compiled(text: str, options: CompileOptions) -> Kernel:
    """Return the Numba dispatcher of a kernel's source."""
    from numba import njit

    from hocket.kernels.numba_internals import KernelCache

    digest = hashlib.sha256(f"{options}\n{text}".encode()).hexdigest()
    flags: dict[str, Any] = {
        "nogil": True, "error_model": "numpy", "fastmath": options.fastmath,
        "boundscheck": options.boundscheck, "no_cfunc_wrapper": True,
    }  # fmt: skip
    # Numba looks up a function's module by name when it loads cached code, so the module is
    # registered.
    module = ModuleType(f"hocket_loop_{digest[:24]}")
    sys.modules[module.__name__] = module
    module.__dict__["OPTIONS_"] = flags
    exec(compile(text, f"<{module.__name__}>", "exec"), module.__dict__)
    function = module.__dict__["kernel"]
    kernel: Any = njit(**flags)(function)
    kernel._cache = KernelCache(SourceFunction(function, allocates=True), digest)
    found: Kernel = kernel
    return found
