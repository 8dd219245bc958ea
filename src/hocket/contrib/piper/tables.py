"""Piper's model as arrays: what layers cost by tensor degree and way, and what stages cost.

Time per microbatch of a stage with tensor degree t and data degree d (Piper, section 4; the factors
are those of its program): each layer counts (time + 2 · bytes over edges cut / bandwidth) / d, plus
4 (d - 1) / d · parameter bytes / (bandwidth · microbatches of a batch) for synchronising replicas.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray, pointers
from hocket.contrib.piper.downsets import DownsetStages, bridged, find_stages
from hocket.contrib.piper.input import PiperInput, PiperNode, Variant
from hocket.kernels.containers import table


class PiperTable(NamedTuple):
    """Layers, degrees and ways."""

    num_ways: LongArray
    """[layer, degree]: 0 where the layer cannot have the tensor degree."""
    time_s: FloatArray
    """[layer, degree, way]."""
    sync_s: FloatArray
    """[layer, degree, way]: per batch, without the factor of the data degree."""
    activation_bytes: LongArray
    """[layer, degree, way]: rounded up."""
    fixed_bytes: LongArray
    """[layer, degree, way]: rounded up."""
    near_ptr: LongArray
    """Neighbours of a layer are from ``near_ptr[layer]`` on."""
    near_layer: LongArray
    near_s: FloatArray
    """[neighbour, degree, way]: what the layer pays if the neighbour is in another stage."""
    tensor: LongArray
    """Tensor degrees, rising."""
    data: LongArray
    """Data degrees, rising: those that divide the microbatches of a batch."""
    rest_work_s: FloatArray
    """[set]: time that all layers outside a set take on one device at least."""
    limit_bytes: int
    num_devices: int
    max_replicas: int
    """The sum of data degrees is at most this."""


class Prepared(NamedTuple):
    """All that the programme over sets reads, and which node each layer is."""

    table: PiperTable
    stages: DownsetStages
    nodes: tuple[PiperNode, ...]
    """The node of each layer."""


def is_free(node: PiperNode, model: PiperInput, degrees: set[int]) -> bool:
    """Whether a node costs nothing wherever it is, so that it can go with any neighbour."""
    if not degrees.issubset(node.variants):
        return False
    by_id = {other.id: other for other in model.nodes}
    for (src, dst), cost in model.edges.items():
        if node.id not in (src, dst):
            continue
        synced = [variant.sync_backward[dst] for variant in _all_variants(by_id[src])]
        synced += [variant.sync_forward[src] for variant in _all_variants(by_id[dst])]
        if cost or any(synced):
            return False
    return not any(
        v.time_s or v.parameter_bytes or v.activation_bytes or v.fixed_bytes
        for v in _all_variants(node)
    )


def _all_variants(node: PiperNode) -> list[Variant]:
    return [variant for variants in node.variants.values() for variant in variants]


def prepare(model: PiperInput, num_devices: int) -> Prepared:
    """The arrays of a model for at most ``num_devices`` devices."""
    degrees = sorted({degree for node in model.nodes for degree in node.variants})
    free = {node.id for node in model.nodes if is_free(node, model, set(degrees))}
    nodes = tuple(node for node in model.nodes if node.id not in free) or model.nodes[:1]
    kept = {node.id: layer for layer, node in enumerate(nodes)}
    edges = bridged(model.edges, [node.id for node in model.nodes if node.id not in kept])
    edges = {(kept[src], kept[dst]): cost for (src, dst), cost in edges.items()}
    stages, members = find_stages(len(nodes), edges)
    degrees = [degree for degree in degrees if degree <= num_devices]
    return Prepared(_table(model, nodes, edges, degrees, members, num_devices), stages, nodes)


def _table(
    model: PiperInput, nodes: tuple[PiperNode, ...], edges: dict[tuple[int, int], float],
    degrees: list[int], members: np.ndarray, num_devices: int,
) -> PiperTable:  # fmt: skip
    max_ways = max(len(variants) for node in nodes for variants in node.variants.values())
    shape = (len(nodes), len(degrees), max_ways)
    ways = np.zeros(shape[:2], dtype=np.int64)
    time_s, sync_s, work_s = np.full(shape, np.inf), np.zeros(shape), np.full(shape, np.inf)
    kept, fixed = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    limit_bytes = int(model.memory_bytes)
    per_byte_s = 4.0 / model.num_microbatches / model.bandwidth_bps
    for layer, node in enumerate(nodes):
        for index, degree in enumerate(degrees):
            variants = node.variants.get(degree, ())
            ways[layer, index] = len(variants)
            for way, variant in enumerate(variants):
                at = layer, index, way
                time_s[at] = variant.time_s
                sync_s[at] = variant.parameter_bytes * per_byte_s
                work_s[at] = variant.time_s * degree
                # More than all memory is never chosen, and larger sums would overflow.
                kept[at] = min(limit_bytes + 1, math.ceil(variant.activation_bytes))
                fixed[at] = min(limit_bytes + 1, math.ceil(variant.fixed_bytes))
    least_s = work_s.min(axis=(1, 2), initial=np.inf)
    # Not as a product of matrices: its compiled code can leave "invalid value" behind from lanes of
    # a register that hold no number of ours.
    outside_s = np.where(members, 0.0, np.where(np.isfinite(least_s), least_s, 0.0)).sum(axis=1)
    near_ptr, near_layer, near_s = _neighbours(model, nodes, edges, degrees, max_ways)
    data = [d for d in range(1, num_devices + 1) if model.num_microbatches % d == 0]
    return PiperTable(
        num_ways=table(ways, np.int64),
        time_s=table(time_s, np.float64),
        sync_s=table(sync_s, np.float64),
        activation_bytes=table(kept, np.int64),
        fixed_bytes=table(fixed, np.int64),
        near_ptr=table(near_ptr, np.int64),
        near_layer=table(near_layer, np.int64),
        near_s=table(near_s, np.float64),
        tensor=table(degrees, np.int64),
        data=table(data, np.int64),
        rest_work_s=table(outside_s, np.float64),
        limit_bytes=limit_bytes,
        num_devices=num_devices,
        max_replicas=min(num_devices, model.num_microbatches),
    )


def _neighbours(
    model: PiperInput, nodes: tuple[PiperNode, ...], edges: dict[tuple[int, int], float],
    degrees: list[int], max_ways: int,
) -> tuple[LongArray, LongArray, FloatArray]:  # fmt: skip
    """For each layer its neighbours, and what their edges cost it when they are cut."""
    near: list[list[tuple[int, float, bool]]] = [[] for _ in nodes]
    for (src, dst), cost in edges.items():
        near[src].append((dst, cost, False))
        near[dst].append((src, cost, True))
    near_s = np.zeros((2 * len(edges), len(degrees), max_ways))
    at = 0
    for layer, neighbours in enumerate(near):
        for other, cost, is_forward in neighbours:
            for index, degree in enumerate(degrees):
                for way, variant in enumerate(nodes[layer].variants.get(degree, ())):
                    sync = variant.sync_forward if is_forward else variant.sync_backward
                    # Edges that only bridge a node left out are in no variant and free.
                    size = cost + sync.get(nodes[other].id, 0.0)
                    near_s[at, index, way] = 2.0 * size / model.bandwidth_bps
            at += 1
    ptr = pointers([len(neighbours) for neighbours in near])
    flat = [other for neighbours in near for other, _, _ in neighbours]
    return ptr, np.array(flat, dtype=np.int64), near_s
