"""What signatures of ops tell: the shapes of the tensors that an op is called with."""

from __future__ import annotations

import re

_TENSOR = re.compile(r"(?<![a-z0-9_])[a-z][a-z0-9_]*\[((?:[0-9]{1,15}(?:,|(?=\])))*)\]")
"""Extents that no tensor has are none, and a name begins in one place: files may hold anything."""


def tensor_shapes(text: str) -> list[tuple[int, ...]]:
    """Extents of all tensors in a signature or in one of its arguments, in order."""
    return [tuple(int(n) for n in found.split(",") if n) for found in _TENSOR.findall(text)]
