"""How PyTorch's allocator gives out memory of a GPU: in whole units."""

from __future__ import annotations

from typing import TypeVar

from hocket.base.arrays import LongArray

ALIGNMENT_BYTES = 512
"""What sizes are rounded up to; tensors side by side in one buffer begin at its multiples, too."""
Sizes = TypeVar("Sizes", int, LongArray)


def aligned(num_bytes: Sizes) -> Sizes:
    """What tensors of such sizes take."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
