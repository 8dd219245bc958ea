"""Settings of one function's loops: the checked arguments of ``parallel_for``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.loops.job import LoopJob


@dataclass(frozen=True)
class Settings:
    """The arguments of ``parallel_for``, checked and with defaults filled in."""

    num_workers: int
    backend: Callable[[LoopJob], list[tuple[Any, ...]]]
    ordered: bool = False
    """True if dependent iterations must run in the order of the loop."""
    permit: tuple[str, ...] = ()
    """Arrays whose updates may be seen late by other workers."""
    through: Mapping[str, str] = field(default_factory=dict)
    """Permitted arrays that are updated through tables, each with its rule: "table" or "revise"."""
    rate: float = 0.1
    """Step size of adaptive revision."""
    max_delay: int | None = None
    """Iterations of one worker between two exchanges of buffered arrays; None for a default."""
    fastmath: bool = False
    check_bounds: bool = True
    outside: Callable[[str], Any] | None = None
    """Returns the current value of a name outside the function."""
