"""Signatures of ops: the shapes of the tensors with which an op is called."""

from __future__ import annotations

import re
from collections.abc import Collection

_NUMBERS = r"((?:[0-9]{1,15}(?:,|(?=[\]}])))*)"
_TENSOR = re.compile(
    r"(?<![a-z0-9_])([a-z][a-z0-9_]*)\[" + _NUMBERS + r"\](?:\{" + _NUMBERS + r"\})?"
)
"""A tensor with dtype and extents in a signature.

Limits the number of digits and where a name may begin, because files may hold any text.
"""


def tensor_shapes(text: str, dtypes: Collection[str] | None = None) -> list[tuple[int, ...]]:
    """Extents of all tensors (or those of some dtypes) in a signature or argument, in order."""
    return [shape for shape, _ in tensor_layouts(text, dtypes)]


def tensor_layouts(
    text: str, dtypes: Collection[str] | None = None
) -> list[tuple[tuple[int, ...], tuple[int, ...] | None]]:
    """Extents and strides of all tensors (or those of some dtypes).

    Strides are None for contiguous tensors, and if they do not match the extents.
    """
    found = []
    for dtype, extents, steps in _TENSOR.findall(text):
        if dtypes is None or dtype in dtypes:
            shape, strides = _numbers(extents), _numbers(steps)
            found.append((shape, strides if len(strides) == len(shape) else None))
    return found


def _numbers(text: str) -> tuple[int, ...]:
    # A scalar has empty extents, which split into one empty text.
    return tuple(int(number) for number in text.split(",") if number)
