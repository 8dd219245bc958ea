"""Compiled kernels on disk, as the compiler's dispatcher wants its cache to be.

Nothing that goes wrong here stops a kernel from being compiled: what cannot be read is compiled
again, what cannot be written is compiled by the next process too.
"""

from __future__ import annotations

import hashlib
import pickle  # noqa: TID251 - compiled code runs when it is loaded, whatever its form
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numba.core import serialize, types
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys

from hocket.kernels import files
from hocket.kernels.dependencies import SourceFunction
from hocket.kernels.inner import set_environments
from hocket.kernels.progress import compiling

# Parts of the compiler that have no types.
_COMPILED: Any = CompileResult
_SERIALIZE: Any = serialize
_PARTS = ("compiler.py", "elements.py", "inference.py", "inner.py", "values.py", "whole.py")
_OPTIONS = hashlib.sha256(
    b"".join(Path(__file__).with_name(name).read_bytes() for name in _PARTS)
).hexdigest()
"""Digest of the compilation options, which are part of the cache key."""


class KernelCache:
    """The compiled forms of one kernel, by the types of its arguments and the processor."""

    cache_path = None

    def __init__(self, source: SourceFunction, digest: str) -> None:
        self._source, self._digest = source, digest

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled form for some types; None where it is not kept and will be compiled."""
        form = self._form(signature, target.codegen())
        content = files.read(self._source, self._digest, form)
        if content is not None:
            _make_ready(target, content)
            try:
                return _COMPILED._rebuild(target, *pickle.loads(content))  # noqa: S301
            except Exception as error:
                files.tell(f"a compiled kernel cannot be loaded ({error!r}): compiled again")
        compiling(self._source.function.__qualname__)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep what was compiled; called after every compilation."""
        set_environments(result)
        form = self._form(signature, result.codegen)
        files.write(self._source, self._digest, form, _SERIALIZE.dumps(result._reduce()))

    def _form(self, signature: Any, codegen: Any) -> str:
        arguments = signature.args if hasattr(signature, "args") else signature
        versions = (_OPTIONS, numba.__version__, np.__version__, codegen.magic_tuple())
        parts = (*versions, *map(_describe, arguments))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]


def _make_ready(target: Any, content: bytes) -> None:
    """Give the linker what compiled code may name: the runtime's functions and seeds of hashes.

    Refreshing the target as for compiling would import half of the compiler and scipy, half a
    second that code which is there does not need.
    """
    rtsys.initialize(target)
    if b"hashsecret" in content:
        target.refresh()


def _describe(kind: Any) -> str:
    """A type with the names of its fields, which its own name does not tell."""
    if not isinstance(kind, types.BaseTuple):
        return str(kind)
    parts: Any = kind
    return f"{kind} {getattr(kind, 'fields', ())} ({', '.join(map(_describe, parts))})"
