"""Cache decisions for loops that are entered often; leave a loop to Python if that is faster.

Decisions are kept by the types, ranks and rough sizes of the inputs and the signs of numbers
(`Entries.key`). If the calls of a key are short, one of them is timed in plain Python, and the
faster of the two is used from then on (`CallPace`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.loops.compile import Kernel
from hocket.loops.decide import Decision
from hocket.loops.recall import same_content, sign

SHORT_S = 40e-6
"""Shorter compiled calls may be slower than plain Python, as entering them takes a few µs."""
REACHING_S = 2e-6
"""Seconds to enter and leave a compiled loop: collect its variables, bind its results."""
_NUM_TIMED = 4
SKIPPED = 31
"""Entries that stay in Python before the loop is examined again."""
_MAX_KEYS = 64


@dataclass
class CallPace:
    """Times of the calls of one key, compiled and in plain Python."""

    compiled_s: float = np.inf
    plain_s: float = np.inf
    num_compiled: int = 0
    is_measured: bool = False

    def add_compiled(self, seconds: float) -> None:
        """Record the time of a compiled call."""
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
    """A serial decision that holds for every call with the same key."""

    decision: Decision
    kernel: Kernel
    arguments: tuple[str, ...]
    sizes: tuple[Any, ...] | None
    """Shapes and integers for which indices were proven inside; None if they are checked."""
    indices: Mapping[str, Any] = field(default_factory=dict)
    """Contents of the index arrays and numbers for which that proof holds."""
    pace: CallPace = field(default_factory=CallPace)


@dataclass
class Entries:
    """Cached serial decisions of one loop."""

    names: Sequence[str]
    """Names of all inputs and results."""
    found: dict[Any, SerialCall] = field(default_factory=dict)
    num_unproven: int = 0
    """Calls to which the proof did not apply; after a few, indices are checked instead."""

    def key(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """Types, ranks and rough sizes of a call's values, and the signs of its numbers."""
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
        """Return the entry for a call; None if the call has to be decided."""
        entry = self.found.get(self.key(values))
        if entry is None or entry.sizes is None:
            return entry
        if entry.sizes == sizes_of(entry.arguments, values) and same_content(entry.indices, values):
            return entry
        self.num_unproven += 1
        return None

    def put(self, values: Mapping[str, Any], entry: SerialCall) -> SerialCall:
        """Store a decision; the times measured for its key are kept."""
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
    """Shapes of arrays and values of integers, in the order of ``names``."""
    return tuple(
        value.shape if isinstance(value, np.ndarray) else value
        for value in (values[name] for name in names)
        if isinstance(value, (np.ndarray, int, np.integer))
    )
