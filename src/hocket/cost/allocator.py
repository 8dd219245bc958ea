"""What PyTorch's CUDA allocator counts for a tensor: its bytes, rounded as the allocator rounds.

Sizes are multiples of 512 bytes. A block of 10 MiB or more comes from a segment of whole 2 MiB of
its own, and a rest of 1 MiB or less is not split off but counted with it. O(tensors), numpy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.graph import Graph

BLOCK_BYTES = 512
SEGMENT_BYTES = 2 * 2**20
OWN_SEGMENT_FROM_BYTES = 10 * 2**20
MIN_REST_BYTES = 2**20


def allocated_bytes(size_bytes: LongArray) -> LongArray:
    """Bytes that the allocator counts for requests of the given sizes."""
    rounded = _multiple(size_bytes, BLOCK_BYTES)
    segment = _multiple(rounded, SEGMENT_BYTES)
    unsplit = (rounded >= OWN_SEGMENT_FROM_BYTES) & (segment - rounded <= MIN_REST_BYTES)
    return np.where(unsplit, segment, rounded)


def with_allocator_rounding(graph: Graph) -> Graph:
    """The graph with storages of the size that the allocator counts, to predict its peak."""
    return replace(
        graph,
        tensor_bytes=allocated_bytes(graph.tensor_bytes),
        workspace_bytes=_multiple(graph.workspace_bytes, BLOCK_BYTES),
    )


def _multiple(size_bytes: LongArray, unit_bytes: int) -> LongArray:
    return -(-size_bytes // unit_bytes) * unit_bytes
