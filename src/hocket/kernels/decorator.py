"""`kernel`: a function that is compiled when Python first calls it, or with what calls it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast, overload

from hocket.kernels.dependencies import SourceFunction, digest
from hocket.kernels.files import is_kept
from hocket.kernels.flat import flat

_F = TypeVar("_F", bound=Callable[..., Any])
_LOCK = threading.RLock()


@overload
def kernel(function: _F) -> _F: ...
@overload
def kernel(*, allocates: bool) -> Callable[[_F], _F]: ...
def kernel(function: _F | None = None, *, allocates: bool = False) -> _F | Callable[[_F], _F]:
    """A function in compiled code, for Python to call and for other kernels.

    It may use numbers, arrays, named tuples, constants and other kernels. Threads may call it at
    the same time: it runs without the interpreter's lock. Only with ``allocates`` may it make
    arrays, which costs time at every call.
    """

    def wrap(function: _F) -> _F:
        return cast(_F, Kernel(cast(FunctionType, function), allocates))

    return wrap if function is None else wrap(function)


class Kernel(SourceFunction):
    """Behaves as the function that it was made of, which is its attribute ``function``."""

    def __init__(self, function: FunctionType, allocates: bool = False) -> None:
        super().__init__(function, allocates)
        if function.__defaults__ or function.__kwdefaults__:
            raise TypeError(f"{function.__qualname__} has defaults, which a kernel cannot keep")
        functools.update_wrapper(cast(Any, self), function)
        self.entry: Any = None
        self._call: Callable[..., Any] = self._first_call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the compiled form."""
        return self._call(*arguments, **named)

    def _first_call(self, *arguments: Any, **named: Any) -> Any:
        with _LOCK:
            if self.entry is None:
                from hocket.kernels.compiler import compile_entry

                self.entry, self._call = compile_entry(self)
        return self._call(*arguments, **named)

    @functools.cached_property
    def inner(self) -> Any:
        """The form that other kernels call."""
        from hocket.kernels.compiler import compile_inner

        return compile_inner(self)

    @property
    def _numba_type_(self) -> Any:
        """By this the compiler knows, in the code of other kernels, what to call."""
        return self.inner._numba_type_

    @property
    def digest(self) -> str:
        """Changes with everything that enters the compiled form which Python calls."""
        return digest(flat(self))


def is_compiled(*kernels: Callable[..., Any]) -> bool:
    """True if all of them are compiled, in this process or on disk."""
    return all(
        bool(each.entry and each.entry.signatures) or is_kept(each, each.digest)
        for each in cast(tuple[Kernel, ...], kernels)
    )
