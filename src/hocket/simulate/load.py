"""Load: seconds for which each device is busy per step when steps follow each other in a pipeline.

The load of an accelerator is the time of its ops plus, for every tensor that enters or leaves it,
the time of that tensor on the device's own link: once per tensor that enters, and once per tensor
that leaves, however many devices read it. A CPU shares memory with its host, so its load is the
time of its ops alone, unless the cluster has only CPUs. The largest load limits how often steps can
start: the objective of Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
Operators", NeurIPS 2020. O(reads log reads) in numpy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import BoolArray, FloatArray, IntArray
from hocket.graph.graph import Role
from hocket.plan.problem import Problem
from hocket.simulate.lowering import owner_devices


class LinkTimes(NamedTuple):
    """Transfer times: sending a tensor from a to b costs both ``latency_s[a, b] + work * unit_s[a,
    b]``."""

    work: FloatArray
    """Work to send each tensor: its bytes, or the seconds per link that the graph's file states."""
    latency_s: FloatArray
    unit_s: FloatArray
    """[src, dst]: seconds per unit of work; 0 on the diagonal."""
    is_free: BoolArray
    """Per tensor: True if every device has it at no cost, which holds for the batch."""
    pays: BoolArray
    """Per device: True if transfers add to its load."""


def link_times(problem: Problem) -> LinkTimes:
    """Return the times that transfers cost the devices at both ends.

    If the graph's file states seconds per link, each end is busy for its own link, one of the two
    that a transfer crosses. Otherwise both ends are busy for the time of the slowest link of the
    route.
    """
    graph, costs, routes = problem.graph, problem.costs, problem.costs.routes
    # CPUs copy within the host's memory.
    is_cpu = np.array([device.kind.is_cpu for device in problem.cluster.devices], dtype=np.bool_)
    is_stated = costs.tensor_s is not None
    unit_s = (routes.hops > 0).astype(np.float64) if is_stated else 1 / routes.bandwidth_bps
    work = costs.tensor_s if costs.tensor_s is not None else costs.tensor_bytes
    return LinkTimes(
        work=work.astype(np.float64),
        latency_s=routes.latency_s,
        unit_s=unit_s,
        is_free=(graph.tensor_producer < 0) & (graph.tensor_role == Role.INPUT),
        pays=~is_cpu | is_cpu.all(),
    )


def device_load_s(problem: Problem, device_of: IntArray) -> FloatArray:
    """Return the seconds per step for which each device computes or sends and receives."""
    graph, num_devices = problem.graph, problem.cluster.num_devices
    device_of = np.asarray(device_of)
    row = problem.costs.device_row[device_of]
    op_s = problem.costs.op_s[row, np.arange(graph.num_ops)]
    load_s = summed(device_of, op_s, num_devices)
    links = link_times(problem)
    tensor, src, dst = _crossings(problem, device_of, links)
    seconds = links.latency_s[src, dst] + links.work[tensor] * links.unit_s[src, dst]
    coming_s = summed(dst, seconds, num_devices)
    slowest_s = np.zeros(graph.num_tensors)
    np.maximum.at(slowest_s, tensor, seconds)
    # A tensor leaves once, however many devices read it: the slowest of its links counts.
    owner = owner_devices(graph, device_of)
    going_s = summed(owner, slowest_s, num_devices)
    return np.where(links.pays, load_s + coming_s + going_s, load_s)


def max_load_s(problem: Problem, device_of: IntArray) -> float:
    """Return the load of the busiest device."""
    return float(device_load_s(problem, device_of).max(initial=0.0))


def summed(key: NDArray[np.integer], value: FloatArray, count: int) -> FloatArray:
    """Return the sum of the values of each key below ``count``."""
    return np.asarray(np.bincount(key, weights=value, minlength=count), dtype=np.float64)


def _crossings(
    problem: Problem, device_of: IntArray, links: LinkTimes
) -> tuple[IntArray, IntArray, IntArray]:
    """Return (tensor, owner, reading device) of tensors read on other devices, each once."""
    graph, num_devices = problem.graph, max(problem.cluster.num_devices, 1)
    owner = owner_devices(graph, device_of)
    reader = graph.reader
    where = device_of[reader]
    away = (where != owner[graph.reads]) & ~links.is_free[graph.reads]
    key = np.unique(graph.reads[away].astype(np.int64) * num_devices + where[away])
    tensor, other = np.divmod(key, num_devices)
    return tensor.astype(np.int32), owner[tensor], other.astype(np.int32)
