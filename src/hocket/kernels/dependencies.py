"""Dependencies of the compiled form of a function, found from the function's code.

A compiled function contains the functions that it calls, the values of constants that it names and
the field positions of its named tuples. All of them are global names or closure variables of its
code, or of the code of functions that it calls. A walk over these names finds everything, and a
digest of the result shows whether a compiled form still matches the source. Names that occur only
as attributes are looked up as well, so the walk may find unrelated values but misses none. O(names)
over all functions reached.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

_BY_VERSION = frozenset({"builtins", "math", "numba", "numpy"})
"""Packages that are not searched: their versions, or that of Python, are part of the cache key."""


@dataclass(eq=False)
class SourceFunction:
    """A Python function to be compiled, and whether it may allocate arrays."""

    function: FunctionType
    allocates: bool = False


@dataclass(frozen=True)
class Dependency:
    """Module, or enclosing function, in which the name was looked up."""

    module: str
    """Module, or enclosing function, in which the name was looked up."""
    name: str
    text: str
    """Description of the value that changes whenever the value changes."""


def digest(source: SourceFunction) -> str:
    """Return the SHA-256 of all dependencies of a function's compiled form."""
    total = hashlib.sha256()
    for found in dependencies(source):
        total.update(f"{found.module} {found.name} {found.text}\n".encode())
    return total.hexdigest()


def dependencies(source: SourceFunction) -> list[Dependency]:
    """Return all dependencies, the function first; a value with two names occurs twice."""
    found: dict[tuple[int, str, str], Dependency] = {}
    _add("", source.function.__module__, source.function.__qualname__, source, found)
    return list(found.values())


def _add(
    user: str,
    module: str,
    name: str,
    value: object,
    found: dict[tuple[int, str, str], Dependency],
) -> None:
    place = (id(value), module, name)
    if place in found:
        return
    found[place] = Dependency(module, name, _text(value, f"{name!r}, which {user or name} uses"))
    if isinstance(value, SourceFunction):
        function = value.function
        for at, inner, entered in _entering(function):
            _add(function.__qualname__, at, inner, entered, found)


def _entering(function: FunctionType) -> Iterator[tuple[str, str, object]]:
    """Yield (module, name, value) for the global and closure names that a function's code uses."""
    names = sorted(_names(function.__code__))
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if not isinstance(value, ModuleType):
            yield function.__module__, name, value
        elif value.__name__.partition(".")[0] not in _BY_VERSION:
            for attribute in names:
                if hasattr(value, attribute):
                    yield value.__name__, attribute, getattr(value, attribute)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        yield f"{function.__module__}.{function.__qualname__}", name, cell.cell_contents


def _names(code: CodeType) -> set[str]:
    inner = (_names(part) for part in code.co_consts if isinstance(part, CodeType))
    return set(code.co_names).union(*inner)


# ── texts ────────────────────────────────────────────────────────────────────────────────────────


def _text(value: Any, what: str) -> str:
    if isinstance(value, SourceFunction):
        return f"kernel allocates={value.allocates} {_code(value.function.__code__)}"
    if isinstance(value, type):
        # The fields of named tuples are compiled in; other classes are known by name only.
        fields = getattr(value, "_fields", ())
        return f"class {value.__module__}.{value.__qualname__} {fields}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype.str} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, tuple):
        return f"({', '.join(_text(part, what) for part in value)})"
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic | None):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, FunctionType | BuiltinFunctionType | np.ufunc):
        # Compiled code cannot call Python functions, and the others are fixed by their package's
        # version.
        return f"function {value.__module__}.{value.__name__}"
    raise TypeError(f"compiled code cannot use {what}: it is a {type(value).__name__}")


@functools.cache
def _code(code: CodeType) -> str:
    """Text of a code object without its file name and line numbers."""
    # File name and line numbers are excluded, so that editing another function keeps this kernel's
    # cache.
    return repr(
        (
            code.co_name, code.co_code.hex(), code.co_exceptiontable.hex(), code.co_flags,
            code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_names,
            code.co_varnames, code.co_cellvars, code.co_freevars,
            *map(_constant, code.co_consts),
        )
    )  # fmt: skip


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_constant, value))}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    return f"{type(value).__name__} {value!r}"
