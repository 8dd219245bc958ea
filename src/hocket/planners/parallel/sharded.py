"""Sharded data parallelism: replicas hold shards of parameters and state.

Local batches may be unequal. Every gather needs all replicas, so these have equally many
microbatches; the fewest that fit are used, since each further one gathers all parameters again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hocket.base.parts import even_parts
from hocket.plan.sections import Parallel, Replica
from hocket.plan.sections.memory import Update
from hocket.planners.candidates import Candidate
from hocket.planners.parallel.closed_form import Tables, at_size, block_edges
from hocket.planners.parallel.device_groups import even_sizes, group_of, split_batch
from hocket.planners.parallel.memory_relief import fitted
from hocket.planners.parallel.simulated import Budget

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of microbatches that are tried in order, until one fits."""
_SLACK = 0.98
"""Factor on estimated bytes, since values between the computed sizes are interpolated."""


def equal_shards(
    tables: Tables, devices: Sequence[int], budget: Budget, update: Update = "device"
) -> Candidate | None:
    """Equal local batches on all devices, as in FSDP, or with host updates as in DeepSpeed."""
    ranks = list(devices)[: tables.num_samples]
    samples = even_sizes(tables.num_samples, -(-tables.num_samples // len(ranks)))
    return _fewest(tables, ranks[: len(samples)], samples, budget, update)


def unequal_shards(tables: Tables, devices: Sequence[int], budget: Budget) -> Candidate | None:
    """Local batches by the speed of each device, even if it could not hold them unsharded."""
    seconds = [tables.pass_s(device) for device in devices]
    groups = tuple(group_of(tables, (device,), True) for device in devices)
    # Without memory limits: sharding holds what a device could not hold alone.
    free = tuple(
        type(group)(group.devices, time_s, group.size, {})
        for group, time_s in zip(groups, seconds, strict=True)
    )
    samples = split_batch(free, tables.num_samples)
    if samples is None or 0 in samples:
        return None
    found = _fewest(tables, list(devices), samples, budget)
    if found is None or found.feasible or found.plan is None:
        return found
    return fitted(tables, found.plan[Parallel], budget)


def checkpointed(tables: Tables, plain: Candidate, budget: Budget) -> Candidate:
    """A baseline with activation checkpointing of all blocks if that fits and is faster.

    It is tried if the plain baseline does not fit or accumulates gradients, as users would do: all
    blocks, in the fewest microbatches that fit.
    """
    parallel = None if plain.plan is None else plain.plan.get(Parallel)
    if parallel is None or (
        plain.feasible and all(len(replica.microbatches) == 1 for replica in parallel.replicas)
    ):
        return plain
    blocks = tuple(pairwise(block_edges(tables.problem.graph)))
    for count in _COUNTS:
        if count > min(replica.num_samples for replica in parallel.replicas) or not budget.is_left:
            break
        if not _may_fit(tables, parallel, count, is_recomputed=True):
            continue
        replicas = tuple(
            replace(r, microbatches=even_parts(r.num_samples, count), recomputed=blocks)
            for r in parallel.replicas
        )
        found = budget.simulated(replace(parallel, replicas=replicas))
        if found.step_s is not None:
            return found if plain.step_s is None or found.step_s < plain.step_s else plain
    return plain


def _fewest(
    tables: Tables,
    devices: Sequence[int],
    samples: Sequence[int],
    budget: Budget,
    update: Update = "device",
) -> Candidate | None:
    """The config with the fewest microbatches that fits; the last one tried if none does."""
    if len(devices) < 2:
        return None
    names, found = tables.problem.cluster.device_names, None
    counts = [count for count in _COUNTS if count <= min(samples)]
    for count in counts:
        replicas = tuple(
            Replica(devices=(names[device],), microbatches=even_parts(number, count), update=update)
            for device, number in zip(devices, samples, strict=True)
        )
        parallel = Parallel(replicas=replicas, zero=3)
        # The last one is simulated in any case, because its peak tells how much memory is missing.
        if not (count == counts[-1] or _may_fit(tables, parallel, count, is_recomputed=False)):
            continue
        if not budget.is_left:
            break
        found = budget.simulated(parallel)
        if found.feasible:
            break
    return found


def _may_fit(tables: Tables, parallel: Parallel, count: int, *, is_recomputed: bool) -> bool:
    """False if state and saved activations alone overflow a device with ``count`` microbatches.

    Simulating such a candidate would waste effort that later ones need.
    """
    problem = tables.problem
    edges = list(block_edges(problem.graph))
    for replica in parallel.replicas:
        size = -(-replica.num_samples // count)
        saved_bytes = float(at_size(tables, tables.saved_bytes, size)[-1])
        if is_recomputed:
            saved_bytes = float(at_size(tables, tables.crossing_bytes, size)[edges[:-1]].sum())
        state_bytes = float(tables.state_bytes[-1])
        state_bytes -= float(tables.optimizer_bytes[-1]) * (replica.update == "host")
        state_bytes /= len(parallel.replicas) if parallel.sharded else 1
        capacity = int(problem.memory_bytes[problem.cluster.number_of[replica.devices[0]]])
        if _SLACK * (saved_bytes + state_bytes) > capacity:
            return False
    return True
