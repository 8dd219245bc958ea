"""Listeners for kernel compilation, which delays the first use of an installation."""

from __future__ import annotations

from collections.abc import Callable

_listeners: list[Callable[[str], None]] = []


def tell_before_compiling(listener: Callable[[str], None] | None) -> None:
    """Call ``listener`` with the name of each kernel that Python calls before it is compiled."""
    _listeners[:] = [] if listener is None else [listener]


def compiling(name: str) -> None:
    """A kernel is about to be compiled."""
    for listener in _listeners:
        listener(name)
