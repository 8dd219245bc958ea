"""Replicas that do the same at the same time: one of them is simulated and represents all.

Equal replicas on equal devices run in lockstep: each waits for a collective as long as the others.
So a step on hundreds of GPUs takes as many simulated ops as one replica has. Collectives take as
long as they take all ranks; channels that several replicas use for the same transfer are shared
equally. Small steps of few devices are simulated one by one, which reports need. O(devices x
stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel
from hocket.simulate.timeline import Timeline

MAX_DEVICES = 16
"""Up to this many devices all are simulated, unless their ops are many."""
MAX_OPS = 200_000
"""Above this many simulated ops one replica represents all, so that a search can try more."""


def is_symmetric(problem: Problem, parallel: Parallel) -> bool:
    """True if the first tensor-parallel rank of the first replica represents all others."""
    num_passes = parallel.tensor * sum(len(each.microbatches) for each in parallel.replicas)
    is_small = num_passes * problem.graph.num_ops <= MAX_OPS
    if (len(parallel.devices) <= MAX_DEVICES and is_small) or parallel.is_round_robin:
        return False
    if len(parallel.replicas) * parallel.tensor == 1:
        return False
    if len({replace(replica, devices=()) for replica in parallel.replicas}) > 1:
        return False
    ranks = stage_devices(problem, parallel)
    rows, memory = problem.costs.device_row[ranks], problem.memory_bytes[ranks]
    routes, before, after = problem.costs.routes, ranks[:, :-1], ranks[:, 1:]
    columns = (
        rows, memory, routes.bandwidth_bps[before, after], routes.latency_s[before, after],
        routes.bandwidth_bps[after, before], routes.latency_s[after, before],
    )  # fmt: skip
    return all(bool((column == column[0]).all()) for column in columns)


def stage_devices(problem: Problem, parallel: Parallel) -> IntArray:
    """[replica and tensor-parallel rank, stage]: devices of replicas with as many stages each."""
    number = {name: i for i, name in enumerate(problem.cluster.device_names)}
    return np.array(
        [[number[name] for name in replica.devices] for replica in parallel.part_by_part().replicas]
    )


def shared_bandwidth_bps(problem: Problem, ranks: IntArray) -> FloatArray:
    """Bandwidth of each channel that is left for the first of the ranks, which send at once."""
    routes = problem.costs.routes
    most = np.ones(len(routes.channel_names))
    for stage in range(ranks.shape[1] - 1):
        for src, dst in ((stage, stage + 1), (stage + 1, stage)):
            paths = [routes.path(row[src], row[dst]) for row in ranks.tolist()]
            load = np.bincount(np.concatenate(paths), minlength=len(most))
            most[paths[0]] = np.maximum(most[paths[0]], load[paths[0]])
    shared: FloatArray = routes.channel_bandwidth_bps / most
    return shared


def for_all(timeline: Timeline, ranks: Sequence[Sequence[int]]) -> Timeline:
    """The timeline with the peaks of the simulated devices on those that they stand for."""
    peak_bytes = timeline.peak_bytes.copy()
    for row in ranks:
        peak_bytes[list(row)] = timeline.peak_bytes[list(ranks[0])]
    return replace(timeline, peak_bytes=peak_bytes)
