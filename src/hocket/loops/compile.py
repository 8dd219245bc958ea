"""Compiling generated kernels, kept on disk under the digest of their source.

The module is written below the user's cache folder, so that the compiler can keep its result beside
it; what runs is always the text made here, never what the folder holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from hocket.atomic import write_atomically
from hocket.config import cache_folder
from hocket.errors import UsageError

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class CompileOptions:
    """How a kernel is compiled."""

    fastmath: bool = False
    """Whether sums may be reassociated: faster, and other bits than plain Python."""
    boundscheck: bool = True


@lru_cache(maxsize=256)
def compiled(text: str, options: CompileOptions) -> Kernel:
    """The dispatcher of a kernel's source."""
    from numba import njit

    whole = f"# {options}\n{text}"
    digest = hashlib.sha256(whole.encode()).hexdigest()[:24]
    path = cache_folder() / "loops" / f"kernel_{digest}.py"
    keeps = _keep(path, whole)
    flags: dict[str, Any] = {
        "nogil": True, "error_model": "numpy", "fastmath": options.fastmath,
        "boundscheck": options.boundscheck,
    }  # fmt: skip
    space: dict[str, Any] = {"__name__": f"hocket_loop_{digest}", "OPTIONS_": flags}
    exec(compile(whole, str(path), "exec"), space)
    kernel: Kernel = njit(**flags, cache=keeps)(space["kernel"])
    return kernel


def _keep(path: Path, text: str) -> bool:
    """Write the module where it is not yet; False where that is impossible."""
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return True
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except (OSError, UsageError, UnicodeDecodeError):
        return False
    return True
