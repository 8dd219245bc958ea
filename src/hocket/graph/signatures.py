"""Signatures of ops: the shapes of the tensors that an op is called with."""

from __future__ import annotations

import re
from collections.abc import Collection

_NUMBERS = r"((?:[0-9]{1,15}(?:,|(?=[\]}])))*)"
_TENSOR = re.compile(
    r"(?<![a-z0-9_])([a-z][a-z0-9_]*)\[" + _NUMBERS + r"\](?:\{" + _NUMBERS + r"\})?"
)
"""Extents that no tensor has are none, and a name begins in one place: files may hold anything."""


def tensor_shapes(text: str, dtypes: Collection[str] | None = None) -> list[tuple[int, ...]]:
    """Extents of all tensors (of some types) in a signature or one of its arguments, in order."""
    return [shape for shape, _ in tensor_layouts(text, dtypes)]


def tensor_layouts(
    text: str, dtypes: Collection[str] | None = None
) -> list[tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """Extents and strides of all tensors (of some types); None for the strides of contiguous ones
    and for those that do not fit the extents."""
    found = []
    for dtype, extents, steps in _TENSOR.findall(text):
        if dtypes is None or dtype in dtypes:
            shape, strides = _numbers(extents), _numbers(steps)
            found.append((shape, strides if len(strides) == len(shape) else None))
    return found


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)
