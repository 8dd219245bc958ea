"""Time of a data-parallel step that is replayed as a CUDA graph, with all-reduces after it.

A graph is launched as a whole, so no all-reduce can start while it runs; in return, the host
launches no single ops. Small models on fast links gain from replay, others gain more from
overlapping all-reduces with the backward pass. O(ops).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.cost.roofline import costs_from_settings
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Parallel
from hocket.simulate.parallel.batch_costs import exchange_s, gradients_of, priced_at
from hocket.simulate.parallel.gradient_exchange import buckets


def replayed_step_s(problem: Problem, parallel: Parallel, planned: Communication | None) -> float:
    """Return the step time of one-device replicas with replayed graphs, without overlap."""
    settings = {**problem.costs.settings, "launches": "replayed"}
    costs = costs_from_settings(problem.graph, problem.cluster, settings)
    replayed = replace(problem, op_costs=costs)
    number = problem.cluster.number_of
    rows = [costs.device_row[number[own.devices[0]]] for own in parallel.replicas]
    computes_s = max(
        sum(float(priced_at(replayed, size).costs.op_s[row].sum()) for size in own.microbatches)
        for own, row in zip(parallel.replicas, rows, strict=True)
    )
    sizes = problem.graph.tensor_bytes[gradients_of(problem.graph)]
    devices = tuple(number[own.devices[0]] for own in parallel.replicas)
    owners = np.zeros((1, len(sizes)), dtype=np.int32)
    return computes_s + sum(
        exchange_s(problem, devices, int(sizes[members].sum()), planned)
        for members in buckets(sizes, owners)
    )
