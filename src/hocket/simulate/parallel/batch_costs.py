"""Costs of a step at another batch size, of gradient accumulation and of all-reduces.

Results are cached, because searches ask for the same sizes, gradients and devices many times.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import permutations

import numpy as np

from hocket.base.arrays import FloatArray, IntArray
from hocket.cost.collectives import RingPath, rails_path, ring_all_reduce_s, ring_path
from hocket.cost.costs import Costs
from hocket.cost.demand import demand_of
from hocket.cost.memory import as_profiled
from hocket.cost.profile import profile_from_dict
from hocket.cost.roofline import costs_from_settings
from hocket.graph.batches import at_batch
from hocket.graph.build import OpColumns, TensorColumns, assemble
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication
from hocket.simulate.collective import CollectiveTimes

ACCUMULATE = "aten.add_"
_PRICED_AS = "optimizer.add"
"""Op kind whose cost is used for gradient accumulation. Both pass over the parameters once, like an
update. A fit of elementwise ops also contains slow ones (tanh on a CPU), and without a fit both
costs are the same."""
_FEW_RANKS = 6
"""Largest number of devices for which all rings are tried."""


@lru_cache(maxsize=64)
def priced_at(problem: Problem, num_samples: int) -> Problem:
    """Return the problem at another batch size, with costs from the same settings."""
    other = problem.graph.other_batch
    if other is not None and num_samples == other.num_samples:
        return problem
    graph = at_batch(problem.graph, num_samples)
    profile = problem.costs.settings.get("profile")
    if profile is not None:
        # Libraries choose other kernels, with other workspaces, for other sizes.
        graph = as_profiled(graph, problem.cluster, profile_from_dict(profile, "profile"))
    costs = costs_from_settings(graph, problem.cluster, problem.costs.settings)
    # Demands that the caller states hold for ops of every size.
    costs = replace(costs, demand=problem.costs.demand)
    return replace(problem, work=graph, op_costs=costs)


@lru_cache(maxsize=64)
def gradients_of(graph: Graph) -> IntArray:
    """Return the gradients that the optimizer reads, in the order in which they are made."""
    is_update = graph.op_phase == Phase.OPTIMIZER
    reader = graph.reader
    read = np.unique(graph.reads[is_update[reader]])
    made = graph.tensor_producer[read] >= 0
    is_update_made = is_update[np.maximum(graph.tensor_producer[read], 0)]
    is_gradient = graph.tensor_role[read] == Role.GRADIENT
    found: IntArray = read[made & ~is_update_made & is_gradient].astype(np.int32)
    return found


@lru_cache(maxsize=64)
def accumulate_s(problem: Problem, parts: tuple[int, ...]) -> FloatArray:
    """Return [device type, part]: seconds to add one gradient to its accumulated sum."""
    return _sum_costs(problem, parts)[1].op_s


@lru_cache(maxsize=64)
def accumulate_demand(problem: Problem, parts: tuple[int, ...]) -> FloatArray | None:
    """Return the demand of gradient sums on a device, as in `Costs`.

    None, which means that a sum fills the device, if the problem gives the demand of its ops.
    """
    if problem.costs.demand is not None:
        return None
    graph, costs = _sum_costs(problem, parts)
    return demand_of(graph, problem.cluster, costs)


@lru_cache(maxsize=64)
def _sum_costs(problem: Problem, parts: tuple[int, ...]) -> tuple[Graph, Costs]:
    """Return a graph of one elementwise add per gradient, and its costs."""
    sizes = problem.graph.tensor_bytes[list(parts)]
    names = [f"add.{index}" for index in range(len(sizes))]
    graph = assemble(
        "gradients",
        OpColumns(
            name=names,
            kind=[_PRICED_AS] * len(names),
            phase=np.full(len(names), Phase.BACKWARD),
            flops=sizes / 4,
            bytes_touched=3 * sizes,
        ),
        TensorColumns(name=names, bytes=sizes, producer=np.arange(len(names))),
        np.zeros(len(names) + 1),
        [],
    )
    # A profile has no such ops, and its efficiency fit is not part of the settings.
    settings = {**problem.costs.settings, "profile": None}
    return graph, costs_from_settings(graph, problem.cluster, settings)


def exchange_s(
    problem: Problem, devices: tuple[int, ...], num_bytes: int, planned: Communication | None
) -> float:
    """Return the seconds of an all-reduce: by the planned collective, else by a ring.

    The planned collective counts only if it is for exactly these devices.
    """
    names = {problem.cluster.device_names[device] for device in devices}
    # A planned collective for other devices says nothing about these.
    if planned is not None and set(planned.ranks) == names:
        return _times_of(problem, planned).time_s(num_bytes)
    ring = best_ring(problem, devices)
    return float(ring_all_reduce_s(num_bytes, len(devices), ring.latency_s, ring.bandwidth_bps))


@lru_cache(maxsize=64)
def _times_of(problem: Problem, planned: Communication) -> CollectiveTimes:
    return CollectiveTimes(planned, problem.cluster)


@lru_cache(maxsize=1024)
def best_ring(problem: Problem, devices: tuple[int, ...]) -> RingPath:
    """Return the ring with the most bandwidth; above 6 devices, the one in the given order."""
    rails = rails_path(problem.cluster, devices)
    if len(devices) > _FEW_RANKS:
        return rails
    rings = (ring_path(problem.cluster, (devices[0], *rest)) for rest in permutations(devices[1:]))
    # Of equal bandwidths the ring with the lower latency.
    return max((rails, *rings), key=lambda ring: (ring.bandwidth_bps, -ring.latency_s))
