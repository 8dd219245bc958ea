"""Symmetric replicas: one is simulated and stands for all others that run in lockstep with it.

Equal replicas on equal devices run in lockstep, since each waits equally long for collectives. So a
step on hundreds of GPUs needs as many simulated ops as one replica has. Collectives take the time
that they take with all ranks, and channels that several replicas use at once are split equally.
Small steps on few devices are simulated in full, which reports need. O(devices x stages).
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
"""Largest number of devices of which all are simulated, if the ops are not too many."""
MAX_OPS = 200_000
"""Number of simulated ops above which one replica stands for all, to keep searches fast."""


def is_symmetric(problem: Problem, parallel: Parallel) -> bool:
    """Return True if the first tensor-parallel rank of the first replica stands for all others."""
    num_passes = parallel.tensor * sum(len(each.microbatches) for each in parallel.replicas)
    is_small = num_passes * problem.graph.num_ops <= MAX_OPS
    if (len(parallel.devices) <= MAX_DEVICES and is_small) or parallel.is_round_robin:
        return False
    # A single device has nobody to stand for.
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
    # Equal stages on equal devices and links: then all ranks take equally long.
    return all(bool((column == column[0]).all()) for column in columns)


def stage_devices(problem: Problem, parallel: Parallel) -> IntArray:
    """Return [replica and tensor-parallel rank, stage]: the device of each stage."""
    number = problem.cluster.number_of
    return np.array(
        [[number[name] for name in replica.devices] for replica in parallel.part_by_part().replicas]
    )


def shared_bandwidth_bps(problem: Problem, ranks: IntArray) -> FloatArray:
    """Return the bandwidth of each channel per rank when all ranks send at once."""
    routes = problem.costs.routes
    most = np.ones(len(routes.channel_names))
    for stage in range(ranks.shape[1] - 1):
        for src, dst in ((stage, stage + 1), (stage + 1, stage)):
            paths = [routes.path(row[src], row[dst]) for row in ranks.tolist()]
            load = np.bincount(np.concatenate(paths), minlength=len(most))
            # Only channels of the simulated rank matter.
            most[paths[0]] = np.maximum(most[paths[0]], load[paths[0]])
    shared: FloatArray = routes.channel_bandwidth_bps / most
    return shared


def for_all(timeline: Timeline, ranks: Sequence[Sequence[int]]) -> Timeline:
    """Return the timeline with peaks of simulated devices copied to the devices they stand for."""
    peak_bytes = timeline.peak_bytes.copy()
    for row in ranks:
        peak_bytes[list(row)] = timeline.peak_bytes[list(ranks[0])]
    return replace(timeline, peak_bytes=peak_bytes)
