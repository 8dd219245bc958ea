"""Loops that are entered often: found again without analysis, left to Python if that is faster.

A serial loop keeps to the order as written, so all that its kernel depends on are kinds and ranks
of its inputs; those are the key here. A key whose calls are short is timed once in plain Python,
and the faster of the two is taken from then on (`CallPace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.loops.compile import Kernel
from hocket.loops.decide import Decision
from hocket.loops.recall import sign

SHORT_S = 40e-6
"""Compiled calls that take less may be slower than plain Python: reaching them takes a few µs."""
REACHING_S = 2e-6
"""Seconds spent around a compiled loop: the variables as a mapping, the results."""
_NUM_TIMED = 4
SKIPPED = 31
"""Entries of a loop left to Python before it is looked at again."""
_MAX_KEYS = 64


@dataclass
class CallPace:
    """Times of one kind of call, compiled and in plain Python."""

    compiled_s: float = np.inf
    plain_s: float = np.inf
    num_compiled: int = 0
    is_measured: bool = False

    def add_compiled(self, seconds: float) -> None:
        """A compiled call ended."""
        self.num_compiled += 1
        self.compiled_s = min(self.compiled_s, seconds + REACHING_S)

    @property
    def wants_plain(self) -> bool:
        """True if plain Python should be timed once."""
        is_known = self.num_compiled >= _NUM_TIMED
        return is_known and not self.is_measured and self.compiled_s < SHORT_S

    @property
    def prefers_plain(self) -> bool:
        """True if plain Python was faster."""
        return self.is_measured and self.plain_s < self.compiled_s


@dataclass
class SerialCall:
    """A serial decision that holds for every call of one key."""

    decision: Decision
    kernel: Kernel
    arguments: tuple[str, ...]
    sizes: tuple[Any, ...] | None
    """Shapes and numbers for which all indices were proven to be inside; None: they are checked."""
    pace: CallPace = field(default_factory=CallPace)


@dataclass
class Entries:
    """Of one loop."""

    names: Sequence[str]
    """All inputs and results."""
    found: dict[Any, SerialCall] = field(default_factory=dict)
    num_unproven: int = 0
    """Calls whose sizes were not those of the proof; after a few, indices are checked instead."""

    def key(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Kinds, ranks and rough sizes of a call's values."""
        parts: list[Any] = []
        for name in self.names:
            value = values.get(name)
            if type(value) is np.ndarray:
                parts.append((value.dtype.str, value.ndim, value.size.bit_length()))
            elif value is None:
                parts.append(None)
            elif isinstance(value, (int, float, np.number, np.bool_)):
                parts.append((type(value), sign(value)))
            else:
                parts.append(type(value))
        return tuple(parts)

    def get(self, values: Mapping[str, Any]) -> SerialCall | None:
        """The entry for a call; None where it has to be decided."""
        entry = self.found.get(self.key(values))
        if entry is None or entry.sizes is None:
            return entry
        if entry.sizes == sizes_of(entry.arguments, values):
            return entry
        self.num_unproven += 1
        return None

    def put(self, values: Mapping[str, Any], entry: SerialCall) -> SerialCall:
        """Keep a decision; times of calls of its kind stay known."""
        if len(self.found) >= _MAX_KEYS:
            self.found.clear()
        key = self.key(values)
        if key in self.found:
            entry.pace = self.found[key].pace
        self.found[key] = entry
        return entry

    @property
    def proves(self) -> bool:
        """True if it is worth proving that indices are inside."""
        return self.num_unproven < 4


def sizes_of(names: Sequence[str], values: Mapping[str, Any]) -> tuple[Any, ...]:
    """Shapes of arrays, and integers."""
    return tuple(
        value.shape if isinstance(value, np.ndarray) else value
        for value in (values[name] for name in names)
        if isinstance(value, (np.ndarray, int, np.integer))
    )
