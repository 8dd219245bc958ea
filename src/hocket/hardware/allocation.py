"""Rounding of tensor sizes by PyTorch's CUDA allocator."""

from __future__ import annotations

from typing import TypeVar

from hocket.base.arrays import LongArray

ALIGNMENT_BYTES = 512
"""Allocation unit of PyTorch's allocator; tensors that share a buffer are aligned to it too."""
Sizes = TypeVar("Sizes", int, LongArray)


def aligned(num_bytes: Sizes) -> Sizes:
    """Bytes that the allocator uses for tensors of the given sizes."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
