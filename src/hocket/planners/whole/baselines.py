"""What people do without a planner, under the names by which they know it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hocket.plan.problem import Problem
from hocket.plan.sections import Replica, Shares
from hocket.planners.candidates import Candidate, propose
from hocket.planners.placement.layer_blocks import layer_of
from hocket.planners.registry import BASE
from hocket.planners.whole.groups import even_sizes
from hocket.planners.whole.tables import Tables, largest_size

DDP = "DDP"
FSDP = "FSDP"
DEEPSPEED = "DeepSpeed offload"
GPIPE = "GPipe by hand"
UNSPLIT = {"one-device": "one device, unsplit", "device-map-auto": 'device_map="auto"'}
"""Planners of the unsplit batch that stand in the table, and what people call them."""
_GPIPE_MICROBATCHES = 4
"""Microbatches per stage: what GPipe's authors found enough to hide the bubble."""


def unsplit_baselines(problem: Problem) -> Iterator[tuple[str, Candidate]]:
    """Placements of the unsplit batch that take no planning."""
    for name, title in UNSPLIT.items():
        yield title, propose(problem, name, BASE[name])


def ddp(tables: Tables, devices: list[int]) -> Shares | None:
    """Equal shares of the batch on all devices, in as few microbatches as the smallest allows."""
    ranks = devices[: tables.num_samples]
    if len(ranks) < 2:
        return None
    spare = tables.largest_bucket_bytes
    sizes = [largest_size(tables, d, is_repeated=False, spare_bytes=spare) for d in ranks]
    share = -(-tables.num_samples // len(ranks))
    size = min(sizes)
    if size < share:
        size = min(largest_size(tables, d, is_repeated=True, spare_bytes=spare) for d in ranks)
    names = tables.problem.cluster.device_names
    counts = even_sizes(tables.num_samples, share)
    replicas = tuple(
        Replica(devices=(names[device],), microbatches=even_sizes(count, max(size, 1)))
        for device, count in zip(ranks, counts, strict=False)
    )
    return Shares(replicas=replicas)


def gpipe(tables: Tables, devices: list[int]) -> Shares | None:
    """Stages of equally many layers on all devices in their order, all forward passes first."""
    graph, count = tables.problem.graph, len(devices)
    layer = layer_of(graph)
    num_layers = int(layer.max(initial=0)) + 1
    if count < 2 or num_layers < count:
        return None
    first = [stage * num_layers // count for stage in range(1, count)]
    cuts = tuple(int(np.flatnonzero(layer >= number)[0]) for number in first)
    if len(set(cuts)) < len(cuts) or min(cuts) < 1:
        return None
    number = min(tables.num_samples, _GPIPE_MICROBATCHES * count)
    names = tables.problem.cluster.device_names
    replica = Replica(
        devices=tuple(names[device] for device in devices),
        microbatches=even_sizes(tables.num_samples, -(-tables.num_samples // number)),
        cuts=cuts,
    )
    return Shares(replicas=(replica,), schedule="gpipe")
