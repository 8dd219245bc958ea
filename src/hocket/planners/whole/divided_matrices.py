"""Tensor parallelism: groups of equal devices that divide every matrix, one group or several.

Each degree that heads and widths allow is taken with one group or more of devices of a kind that
are next to each other in the cluster. Samples are shared equally, in as few microbatches as the
memory of one part allows. The closed form adds the sums over parts to what a part computes: nothing
hides them. O(degrees x groups).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hocket.cost.collectives import ring_all_reduce_s
from hocket.plan.sections import Replica, Shares
from hocket.planners.whole.groups import even_sizes
from hocket.planners.whole.structures import sensible_counts
from hocket.planners.whole.tables import Tables, largest_size, tables_of
from hocket.simulate.shares.matrices import degrees_of, one_part, regions_of
from hocket.simulate.shares.prices import best_ring, priced_at


class DividedWay(NamedTuple):
    """A way to divide matrices and about what it takes."""

    shares: Shares
    seconds: float


def divided_ways(tables: Tables, devices: Sequence[int]) -> Iterator[DividedWay]:
    """Ways with divided matrices that fit, for each kind of device."""
    for degree in degrees_of(tables.problem.graph):
        for alike in _alike(tables, devices):
            if len(alike) < degree:
                continue
            for num_groups in sensible_counts(min(len(alike) // degree, tables.num_samples)):
                chosen = alike[: num_groups * degree]
                groups = [tuple(chosen[i : i + degree]) for i in range(0, len(chosen), degree)]
                way = _way(tables, degree, groups)
                if way is not None:
                    yield way


def _alike(tables: Tables, devices: Sequence[int]) -> list[list[int]]:
    """Devices of one kind and memory, in the order of the cluster."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for device in devices:
        found[tables.row(device), int(tables.problem.memory_bytes[device])].append(device)
    return list(found.values())


def _way(tables: Tables, degree: int, groups: Sequence[tuple[int, ...]]) -> DividedWay | None:
    part = tables_of(one_part(tables.problem, degree))
    taken = even_sizes(tables.num_samples, -(-tables.num_samples // len(groups)))
    if len(taken) < len(groups):
        return None
    first = groups[0]
    spare = part.largest_bucket_bytes if len(groups) > 1 else 0
    size = largest_size(part, first[0], is_repeated=False, spare_bytes=spare)
    if size < taken[0]:
        size = largest_size(part, first[0], is_repeated=True, spare_bytes=spare)
    if not size:
        return None
    names = tables.problem.cluster.device_names
    replicas = tuple(
        Replica(devices=tuple(names[d] for d in group), microbatches=even_sizes(number, size))
        for group, number in zip(groups, taken, strict=True)
    )
    seconds = max(_seconds(part, group, replica.microbatches)
                  for group, replica in zip(groups, replicas, strict=True))  # fmt: skip
    return DividedWay(Shares(replicas=replicas, tensor=degree), seconds)


def _seconds(part: Tables, group: tuple[int, ...], microbatches: Sequence[int]) -> float:
    """What a group computes and sums, with its updates."""
    regions = regions_of(part.problem.graph)
    assert regions is not None
    ring, pass_s = best_ring(part.problem, group), part.pass_s(group[0])
    tensors = [tensor for _, _, tensor in regions.sums]
    total_s = float(part.update_s[part.row(group[0]), -1])
    for size in microbatches:
        sizes = priced_at(part.problem, size).graph.tensor_bytes[tensors]
        sums_s = ring_all_reduce_s(sizes, len(group), ring.latency_s, ring.bandwidth_bps)
        total_s += float(pass_s[size]) + float(np.sum(sums_s))
    return total_s
