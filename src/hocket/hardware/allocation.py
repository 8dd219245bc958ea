"""Rounding of PyTorch's GPU allocator: memory comes in whole units."""

from __future__ import annotations

from typing import TypeVar

from hocket.base.arrays import LongArray

ALIGNMENT_BYTES = 512
"""Unit of sizes; tensors side by side in one buffer begin at its multiples, too."""
Sizes = TypeVar("Sizes", int, LongArray)


def aligned(num_bytes: Sizes) -> Sizes:
    """Allocated bytes of tensors of such sizes."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
