"""Rounding of tensor sizes by PyTorch's GPU allocator."""

from __future__ import annotations

from typing import TypeVar

from hocket.base.arrays import LongArray

ALIGNMENT_BYTES = 512
"""Unit of allocated sizes; tensors that share a buffer start at its multiples too."""
Sizes = TypeVar("Sizes", int, LongArray)


def aligned(num_bytes: Sizes) -> Sizes:
    """Bytes that the allocator uses for tensors of the given sizes."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
