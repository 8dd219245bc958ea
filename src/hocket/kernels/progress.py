"""Listener for kernel compilation, which delays the first use of an installation."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[str], None]] = []


def tell_before_compiling(listener: Callable[[str], None] | None) -> None:
    """Set the function that is called with a kernel's name before it is compiled; None removes
    it."""
    _listeners[:] = [] if listener is None else [listener]


def compiling(name: str) -> None:
    """Notify the listener that a kernel is about to be compiled."""
    for listener in _listeners:
        listener(name)
