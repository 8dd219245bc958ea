"""Adapt a graph to a device's memory allocator: workspaces and rounding of sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.base.arrays import LongArray
from hocket.cost.profile import Profile, with_measured_workspace
from hocket.graph.graph import Graph
from hocket.hardware.cluster import Cluster

# Bytes that PyTorch's CUDA allocator counts for a tensor.
#
# Sizes are multiples of 512 bytes. A block of 10 MiB or more comes from its own segment of whole 2
# MiB; a remainder of 1 MiB or less is not split off but counted with the block. O(tensors), numpy.

BLOCK_BYTES = 512
SEGMENT_BYTES = 2 * 2**20
OWN_SEGMENT_FROM_BYTES = 10 * 2**20
MIN_REST_BYTES = 2**20


def allocated_bytes(size_bytes: LongArray) -> LongArray:
    """Bytes that the allocator uses for requests of the given sizes."""
    rounded = _multiple(size_bytes, BLOCK_BYTES)
    segment = _multiple(rounded, SEGMENT_BYTES)
    unsplit = (rounded >= OWN_SEGMENT_FROM_BYTES) & (segment - rounded <= MIN_REST_BYTES)
    return np.where(unsplit, segment, rounded)


def with_allocator_rounding(graph: Graph) -> Graph:
    """The graph with storage sizes as the allocator rounds them, to predict its peak."""
    return replace(
        graph,
        tensor_bytes=allocated_bytes(graph.tensor_bytes),
        workspace_bytes=_multiple(graph.workspace_bytes, BLOCK_BYTES),
    )


def _multiple(size_bytes: LongArray, unit_bytes: int) -> LongArray:
    return -(-size_bytes // unit_bytes) * unit_bytes


def as_profiled(graph: Graph, cluster: Cluster, profile: Profile | None) -> Graph:
    """The graph with measured workspaces and allocator rounding.

    Unchanged if the profile is of no accelerator of the cluster: on CPUs no workspace is measured
    and nothing is rounded. Idempotent.
    """
    if profile is None:
        return graph
    kind = next((kind for kind in cluster.kinds if kind.name == profile.device_kind), None)
    if kind is None or kind.is_cpu:
        return graph
    return with_allocator_rounding(with_measured_workspace(graph, profile))
