"""The listener for kernel compilation, which delays the first use of an installation."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[str], None]] = []


def tell_before_compiling(listener: Callable[[str], None] | None) -> None:
    """Set the function called with a kernel's name before the kernel is compiled; None for none."""
    _listeners[:] = [] if listener is None else [listener]


def compiling(name: str) -> None:
    """Tell the listeners that a kernel is about to be compiled."""
    for listener in _listeners:
        listener(name)
