"""Settings of the loops of one function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.loops.job import LoopJob


@dataclass(frozen=True)
class Settings:
    """The arguments of ``parallel_for``, resolved."""

    num_workers: int
    backend: Callable[[LoopJob], list[tuple[Any, ...]]]
    ordered: bool = False
    """True if dependent iterations must run in the order of the loop."""
    permit: tuple[str, ...] = ()
    """Arrays whose updates may be seen late by other workers."""
    through: Mapping[str, str] = field(default_factory=dict)
    """Of these: the arrays that go through tables, "table" or "revise"."""
    rate: float = 0.1
    """Step size of adaptive revision."""
    max_delay: int | None = None
    """Iterations of one worker between two exchanges of buffered arrays."""
    fastmath: bool = False
    check_bounds: bool = True
    outside: Callable[[str], Any] | None = None
    """Finds a global of the function."""
