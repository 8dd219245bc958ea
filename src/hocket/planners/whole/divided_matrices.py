"""Tensor parallelism: devices of one kind that divide every matrix count as one quicker device.

For each degree that heads and widths allow, devices of a kind that are next to each other in the
cluster are taken together, and what one of them does is a problem of its own: the same graph with a
part of every matrix. Replicas and pipelines of such groups are then found by the same closed forms
as those of single devices, with the sums over parts added where they are made: nothing hides them
(Megatron-LM, Shoeybi et al. 2019; with pipelines, Narayanan et al. 2021). O(degrees x structures).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.collectives import ring_all_reduce_s
from hocket.plan.sections import Shares
from hocket.planners.whole.tables import Tables, tables_of
from hocket.simulate.shares.matrices import degrees_of, one_part, regions_of
from hocket.simulate.shares.order import places_of
from hocket.simulate.shares.prices import best_ring, priced_at


@dataclass(frozen=True, eq=False)
class DividedDevices:
    """Groups of devices that divide matrices, each known by its first one."""

    degree: int
    tables: Tables
    """Of what one part does, with the sums over parts."""
    groups: dict[int, tuple[int, ...]]
    """All devices of a group, by the first."""

    def widened(self, shares: Shares) -> Shares:
        """Shares of the first devices as those of whole groups."""
        names = self.tables.problem.cluster.device_names
        of_name = {names[first]: tuple(names[d] for d in g) for first, g in self.groups.items()}
        replicas = (
            replace(r, devices=tuple(name for first in r.devices for name in of_name[first]))
            for r in shares.replicas
        )
        return replace(shares, replicas=tuple(replicas), tensor=self.degree)


def divided_devices(tables: Tables, devices: Sequence[int]) -> Iterator[DividedDevices]:
    """Every degree, with the groups that devices of one kind and memory make."""
    for degree in degrees_of(tables.problem.graph):
        groups = [
            tuple(alike[i : i + degree])
            for alike in _alike(tables, devices)
            for i in range(0, len(alike) - degree + 1, degree)
        ]
        if groups:
            part = tables_of(one_part(tables.problem, degree))
            summed = replace(part, passes_s=part.passes_s + _sums_s(part, groups))
            yield DividedDevices(degree, summed, {group[0]: group for group in groups})


def tables_for(tables: Tables, shares: Shares) -> Tables:
    """The closed forms of what one device does under shares: of all, or of one part."""
    return tables if shares.tensor == 1 else _part_tables(tables, shares.tensor)


@lru_cache(maxsize=16)
def _part_tables(tables: Tables, degree: int) -> Tables:
    return tables_of(one_part(tables.problem, degree))


def _alike(tables: Tables, devices: Sequence[int]) -> list[list[int]]:
    """Devices of one kind and memory, in the order of the cluster."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for device in devices:
        found[tables.row(device), int(tables.problem.memory_bytes[device])].append(device)
    return list(found.values())


def _sums_s(part: Tables, groups: Sequence[tuple[int, ...]]) -> FloatArray:
    """[kind, size, place]: seconds of the sums before a place, in the first group of a kind."""
    graph = part.problem.graph
    regions = regions_of(graph)
    assert regions is not None
    place = places_of(graph)[[each.maker for each in regions.sums]]
    tensors = [each.tensor for each in regions.sums]
    found = np.zeros_like(part.passes_s)
    for group in reversed(groups):
        ring = best_ring(part.problem, group)
        for index, size in enumerate(part.sizes.tolist()):
            sizes = priced_at(part.problem, size).graph.tensor_bytes[tensors]
            sums_s = ring_all_reduce_s(sizes, len(group), ring.latency_s, ring.bandwidth_bps)
            at = np.bincount(place + 1, sums_s, graph.num_ops + 1)
            found[part.row(group[0]), index] = np.cumsum(at)
    return found
