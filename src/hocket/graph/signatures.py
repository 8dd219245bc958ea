"""What signatures of ops tell: the shapes of the tensors that an op is called with."""

from __future__ import annotations

import re
from collections.abc import Collection

_TENSOR = re.compile(r"(?<![a-z0-9_])([a-z][a-z0-9_]*)\[((?:[0-9]{1,15}(?:,|(?=\])))*)\]")
"""Extents that no tensor has are none, and a name begins in one place: files may hold anything."""


def tensor_shapes(text: str, dtypes: Collection[str] | None = None) -> list[tuple[int, ...]]:
    """Extents of all tensors (of some types) in a signature or one of its arguments, in order."""
    return [
        tuple(int(extent) for extent in extents.split(",") if extent)
        for dtype, extents in _TENSOR.findall(text)
        if dtypes is None or dtype in dtypes
    ]
