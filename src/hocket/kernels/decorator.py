"""The decorator `kernel` for functions that are compiled when they are first called."""

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
    """Compile a function, for calls from Python and from other kernels.

    The function may use numbers, arrays, named tuples, constants and other kernels. Threads may
    call it concurrently, since it releases the interpreter's lock. It may allocate arrays only with
    ``allocates``, which makes every call slower because references to arrays are counted.
    """

    def wrap(function: _F) -> _F:
        return cast(_F, Kernel(cast(FunctionType, function), allocates))

    return wrap if function is None else wrap(function)


class Kernel(SourceFunction):
    """A compiled function; ``function`` is the Python function from which it is compiled."""

    def __init__(self, function: FunctionType, allocates: bool = False) -> None:
        super().__init__(function, allocates)
        # The wrapper that `flat` generates has no defaults, so they would be lost.
        if function.__defaults__ or function.__kwdefaults__:
            raise TypeError(f"{function.__qualname__} has defaults, which a kernel cannot keep")
        functools.update_wrapper(cast(Any, self), function)
        self.entry: Any = None
        self._call: Callable[..., Any] = self._first_call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the compiled form, compiling it first if necessary."""
        return self._call(*arguments, **named)

    def _first_call(self, *arguments: Any, **named: Any) -> Any:
        # Without the lock, two threads would compile the same kernel at once.
        with _LOCK:
            if self.entry is None:
                from hocket.kernels.compiler import compile_entry

                self.entry, self._call = compile_entry(self)
        return self._call(*arguments, **named)

    @functools.cached_property
    def inner(self) -> Any:
        """Compiled form that other kernels call."""
        from hocket.kernels.compiler import compile_inner

        return compile_inner(self)

    @property
    def _numba_type_(self) -> Any:
        """Numba's type of this kernel, which numba reads to compile calls from other kernels."""
        return self.inner._numba_type_

    @property
    def digest(self) -> str:
        """Digest of everything that the compiled form called by Python depends on."""
        return digest(flat(self))


def is_compiled(*kernels: Callable[..., Any]) -> bool:
    """Return True if all of the kernels are compiled, in this process or on disk."""
    return all(
        bool(each.entry and each.entry.signatures) or is_kept(each, each.digest)
        for each in cast(tuple[Kernel, ...], kernels)
    )
