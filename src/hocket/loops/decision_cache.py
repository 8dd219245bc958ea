"""Cache decisions of earlier calls, and switch a loop to plain Python if that is faster.

Decisions are stored by the types, ranks and rough sizes of the inputs and the signs of numbers.
Everything else on which a decision relies is compared at every call: shapes, shared memory, the
content of index arrays. If the calls of a key are short, some of them are timed in plain Python,
and the faster of the two is used from then on (`CallPace`).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.loops.compile import Kernel
from hocket.loops.flow import loaded_names
from hocket.loops.nest import Reading

if TYPE_CHECKING:
    from hocket.loops.decide import Decision

SHORT_S = 40e-6
"""Compiled calls shorter than this may be slower than plain Python, because entering takes some µs.
"""
ENTRY_S = 2e-6
"""Seconds to enter and leave a compiled loop: collect its variables, bind its results."""
SKIPPED = 31
"""Number of entries that stay in Python before the loop is examined again."""
_NUM_TIMED = 4
"""Number of timed calls, compiled and in plain Python; the fastest of them counts."""
_MAX_KEYS = 64
MAX_ENTRIES = 4
"""Maximum number of decisions per key."""
_MAX_UNPROVEN = 4

Values = Mapping[str, Any]


@dataclass
class CallPace:
    """Times of the calls of one key, compiled and in plain Python."""

    compiled_s: float = np.inf
    plain_s: float = np.inf
    num_compiled: int = 0
    num_plain: int = 0

    def add_compiled(self, seconds: float) -> None:
        """Record the time of a compiled call."""
        self.num_compiled += 1
        # The minimum of several calls, because other programs only lengthen times.
        self.compiled_s = min(self.compiled_s, seconds + ENTRY_S)

    def add_plain(self, seconds: float) -> None:
        """Record the time of a call in plain Python."""
        self.num_plain += 1
        self.plain_s = min(self.plain_s, seconds)

    @property
    def wants_plain(self) -> bool:
        """True if a call in plain Python should be timed."""
        is_known = self.num_compiled >= _NUM_TIMED
        return is_known and self.num_plain < _NUM_TIMED and self.compiled_s < SHORT_S

    @property
    def prefers_plain(self) -> bool:
        """True if plain Python was faster."""
        return self.num_plain >= _NUM_TIMED and self.plain_s < self.compiled_s


@dataclass
class Guard:
    """Conditions of a decision: a function of the values with its expected result, and expected
    contents.
    """

    look: Callable[[Values], Any]
    seen: Any
    content: Values

    def holds(self, values: Values) -> bool:
        """True if the decision holds for these values."""
        return bool(self.look(values) == self.seen) and all(
            np.array_equal(known, values[name])
            if isinstance(known, np.ndarray)
            else known == values[name]
            for name, known in self.content.items()
        )


@dataclass
class Entry:
    """A decision that applies to every call with the same key whose values pass its guard."""

    decision: Decision
    guard: Guard | None
    pace: CallPace
    kernel: Kernel | None = None


@dataclass
class DecisionCache:
    """Decisions of one loop."""

    names: Sequence[str]
    """Names of all inputs and results."""
    found: dict[Any, list[Entry]] = field(default_factory=dict)
    num_unproven: int = 0
    """Calls to which no decision of their key applied."""

    @property
    def proves(self) -> bool:
        """True if decisions may rely on sizes, because sizes have not changed too often."""
        return self.num_unproven < _MAX_UNPROVEN

    def key(self, values: Values) -> tuple[Any, ...]:
        """Types, ranks and rough sizes of a call's values, and the signs of its numbers."""
        parts: list[Any] = []
        for name in self.names:
            value = values.get(name)
            if type(value) is np.ndarray:
                # Another schedule may be better for twice the size, but not for a few more
                # elements.
                parts.append((value.dtype.str, value.ndim, value.size.bit_length()))
            elif isinstance(value, (int, np.integer)):
                parts.append((type(value), sign(value), int(value).bit_length()))
            elif isinstance(value, (float, np.number, np.bool_)):
                parts.append((type(value), sign(value)))
            else:
                parts.append(type(value))
        return tuple(parts)

    def get(self, values: Values) -> Entry | None:
        """The cached entry for a call; None if the call must be decided."""
        entries = self.found.get(self.key(values), ())
        for entry in entries:
            if entry.guard is None or entry.guard.holds(values):
                return entry
        self.num_unproven += bool(entries)
        return None

    def put(self, values: Values, decision: Decision, guard: Guard | None) -> Entry:
        """Store a decision; times measured for its key are kept."""
        # Bounds the memory of programs whose sizes never repeat.
        if len(self.found) >= _MAX_KEYS:
            self.found.clear()
        entries = self.found.setdefault(self.key(values), [])
        entry = Entry(decision, guard, entries[0].pace if entries else CallPace())
        entries.insert(0, entry)
        del entries[MAX_ENTRIES:]
        return entry


def sign(value: Any) -> int:
    """-1, 0 or 1; compiled code omits checks that the sign makes unnecessary."""
    return int(value > 0) - int(value < 0)


def content(readings: Iterable[Reading], values: Values) -> dict[str, Any]:
    """Copies of the integers and index arrays on which a decision depends."""
    texts: set[str] = set()
    for reading in readings:
        texts |= {str(part.text) for each in reading.ranges for part in each}
        texts |= {
            str(end) for loop in reading.body.inner.values() for end in (loop.start, loop.stop)
        }
        subs = [sub for access in reading.body.accesses for sub in access.subs if sub.index]
        terms = [term for sub in subs if sub.index for term in sub.index.terms]
        texts |= {atom.name for atom, _ in terms if atom.kind != "inner"}
        texts |= {text for each in reading.segments for text in (each.start, each.stop)}
        texts |= {stop for stops in reading.private.values() for stop in stops}
    used = loaded_names([ast.parse(text) for text in texts])
    found: dict[str, Any] = {}
    for name in used & values.keys():
        value = values[name]
        if not isinstance(value, np.ndarray):
            found[name] = value
        elif value.dtype.kind in "iub":
            found[name] = value.copy()
    return found
