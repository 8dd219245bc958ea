"""Decide if the decision for an earlier call holds for a new one.

Two calls match if their values have the same types, shapes and shared memory, and the arrays and
numbers used as indices have the same content (compared, never assumed).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hocket.loops.nest import Reading


def signature(
    values: Mapping[str, Any], owners: Mapping[str, str], *, with_sizes: bool = True
) -> Any:
    """Key of a call by the types and memory layout of its arguments."""
    parts: list[Any] = []
    for name in sorted(values):
        value = values[name]
        if isinstance(value, np.ndarray):
            sizes = (value.shape, value.strides) if with_sizes else value.ndim
            parts.append((name, value.dtype.str, sizes, owners[name]))
        else:
            parts.append((name, type(value), sign(value) if with_sizes else 0))
    return tuple(parts)


def sign(value: Any) -> int:
    """-1, 0 or 1; compiled code omits checks that a number's sign makes unnecessary."""
    return int(value > 0) - int(value < 0)


def content(readings: Iterable[Reading], values: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the integers and index arrays that a decision depends on."""
    texts: set[str] = set()
    for reading in readings:
        texts |= {str(part.text) for each in reading.ranges for part in each}
        texts |= {
            str(end) for loop in reading.body.inner.values() for end in (loop.start, loop.stop)
        }
        texts |= {atom.name for a in reading.body.accesses for s in a.subs
                  if s.index is not None for atom, _ in s.index.terms}  # fmt: skip
        texts |= {text for each in reading.segments for text in (each.start, each.stop)}
        texts |= {stop for covers in reading.private.values() if covers for stop in covers.stops}
        texts |= set(reading.nonempty)
    used = {
        node.id
        for text in texts
        if "@" not in text
        for node in ast.walk(ast.parse(text, mode="eval"))
        if isinstance(node, ast.Name)
    }
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            if name in used and value.dtype.kind in "iub":
                found[name] = value.copy()
        elif name in used:
            found[name] = value
    return found


def same_content(known: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """True if all values copied from an earlier call equal those of this call."""
    return all(
        np.array_equal(value, values[name])
        if isinstance(value, np.ndarray)
        else value == values[name]
        for name, value in known.items()
    )
