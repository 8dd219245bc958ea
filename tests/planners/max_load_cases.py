"""Small generated graphs with stated times, and slow answers to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import networkx as nx
import numpy as np
from hypothesis import strategies as st
from simulate.problems import tape

from hocket.graph.formats.dnn_partitioning import graph_from_dnn_partitioning
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.make import make_problem
from hocket.plan.problem import Problem

TIMES = (0.0, 0.0, 1.0, 2.0, 3.0, 5.0)
MOST_EDGES = 10


@st.composite
def stated_problems(draw: Any, max_nodes: int = 6, max_size: int = 3) -> Problem:
    """A file of the NeurIPS 2020 form: two accelerators, a processor, colours, backward nodes."""
    choices = tape(draw, 4 + 6 * max_nodes + MOST_EDGES)
    num = 1 + choices.below(max_nodes)
    num_backward = choices.pick([0, 0, num // 2])
    size_per_accelerator = choices.pick([4, 100])
    nodes = [
        {
            "id": index,
            "supportedOnFpga": int(choices.below(10) < 9),
            "fpgaLatency": choices.pick(TIMES),
            "cpuLatency": 3 * choices.pick(TIMES),
            "isBackwardNode": int(index >= num - num_backward),
            "size": choices.below(max_size + 1),
            **(
                {} if (color := choices.pick([None, None, 0, 1])) is None else {"colorClass": color}
            ),
        }
        for index in range(num)
    ]
    cost = [choices.pick(TIMES) for _ in nodes]
    pairs = [(a, b) for b in range(num) for a in range(b)]
    num_edges = choices.below(MOST_EDGES + 1) if pairs else 0
    chosen = {choices.pick(pairs) for _ in range(num_edges)}
    data = {
        "maxSizePerFPGA": size_per_accelerator,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": nodes,
        "edges": [{"sourceId": a, "destId": b, "cost": cost[a]} for a, b in sorted(chosen)],
    }
    return make_problem(graph_from_dnn_partitioning(data, "generated"), "file")


def unit_of(graph: Graph) -> list[int]:
    """Ops that must share a device, by plain union of groups and partners."""
    ties = nx.Graph()
    ties.add_nodes_from(range(graph.num_ops))
    ties.add_edges_from((op, int(p)) for op, p in enumerate(graph.partner) if p >= 0)
    for group in set(graph.group[graph.group >= 0].tolist()):
        nx.add_path(ties, np.flatnonzero(graph.group == group).tolist())
    found = [0] * graph.num_ops
    for number, members in enumerate(nx.connected_components(ties)):
        for op in members:
            found[op] = number
    return found


def precedence(graph: Graph) -> list[tuple[int, int]]:
    """Edges between units that a contiguous split respects."""
    unit = unit_of(graph)
    has_forward = {unit[op] for op in range(graph.num_ops) if graph.op_phase[op] == Phase.FORWARD}
    found = []
    for a, b in zip(*(ends.tolist() for ends in graph.edges), strict=True):
        if graph.op_phase[a] == graph.op_phase[b] == Phase.FORWARD:
            found.append((unit[a], unit[b]))
        elif graph.op_phase[a] != Phase.FORWARD and not {unit[a], unit[b]} <= has_forward:
            found.append((unit[b], unit[a]))
    return found


def is_ordered(problem: Problem, device_of: np.ndarray) -> bool:
    """Whether devices can be put in an order that no precedence goes against."""
    device = dict(zip(unit_of(problem.graph), device_of.tolist(), strict=True))
    between = nx.DiGraph()
    between.add_edges_from(
        (device[a], device[b]) for a, b in precedence(problem.graph) if device[a] != device[b]
    )
    return nx.is_directed_acyclic_graph(between)


def returns_to_a_device(problem: Problem, device_of: np.ndarray) -> bool:
    """Whether a path of forward ops leaves a device and comes back."""
    graph = problem.graph
    forward = nx.DiGraph()
    forward.add_nodes_from(np.flatnonzero(graph.op_phase == Phase.FORWARD).tolist())
    for a, b in zip(*(ends.tolist() for ends in graph.edges), strict=True):
        if a in forward and b in forward:
            forward.add_edge(a, b)
    for op in forward:
        for middle in nx.descendants(forward, op):
            if device_of[middle] == device_of[op]:
                continue
            if any(device_of[end] == device_of[op] for end in nx.descendants(forward, middle)):
                return True
    return False


def all_placements(problem: Problem) -> Iterator[np.ndarray]:
    """Every placement of units that runs and fits, by the sums of sizes."""
    unit = np.array(unit_of(problem.graph))
    num_devices = problem.cluster.num_devices
    op_s = problem.costs.op_s[problem.costs.device_row]
    size = plain_sizes(problem.graph)
    for choice in product(range(num_devices), repeat=int(unit.max()) + 1):
        device_of = np.array(choice)[unit]
        if not np.isfinite(op_s[device_of, np.arange(len(unit))]).all():
            continue
        held = np.bincount(device_of, weights=size, minlength=num_devices)
        if np.all(held <= problem.memory_bytes):
            yield device_of


def plain_sizes(graph: Graph) -> np.ndarray:
    """The size that a file states for each node: its parameter."""
    size = np.zeros(graph.num_ops)
    for tensor in np.flatnonzero(graph.tensor_role == Role.PARAMETER):
        size[graph.users_of(int(tensor))[0]] += graph.tensor_bytes[tensor]
    return size


def plain_load_s(problem: Problem, device_of: np.ndarray) -> list[float]:
    """Loads by the definition, one tensor and one device at a time."""
    graph, costs = problem.graph, problem.costs
    cpu = [device.kind.is_cpu for device in problem.cluster.devices]
    load = [0.0] * problem.cluster.num_devices
    for op in range(graph.num_ops):
        load[device_of[op]] += float(costs.op_s[costs.device_row[device_of[op]], op])
    for tensor in range(graph.num_tensors):
        made_by = int(graph.tensor_producer[tensor])
        if made_by < 0 and graph.tensor_role[tensor] == Role.INPUT:
            continue
        home = _home(graph, tensor, device_of)
        others = {int(device_of[op]) for op in graph.users_of(tensor)} - {home}
        seconds = {other: _link_s(problem, tensor, home, other) for other in others}
        for other in others:
            load[other] += seconds[other] * (not cpu[other] or all(cpu))
        load[home] += max(seconds.values(), default=0.0) * (not cpu[home] or all(cpu))
    return load


def _home(graph: Graph, tensor: int, device_of: np.ndarray) -> int:
    if graph.tensor_producer[tensor] >= 0:
        return int(device_of[graph.tensor_producer[tensor]])
    same = np.flatnonzero(graph.root_of == graph.root_of[tensor])
    readers = [int(op) for t in same for op in graph.users_of(int(t))]
    return int(device_of[min(readers)]) if readers else 0


def _link_s(problem: Problem, tensor: int, src: int, dst: int) -> float:
    routes = problem.costs.routes
    if problem.costs.tensor_s is not None:
        return float(routes.latency_s[src, dst] + problem.costs.tensor_s[tensor])
    return float(
        routes.latency_s[src, dst]
        + problem.costs.tensor_bytes[tensor] / routes.bandwidth_bps[src, dst]
    )


def contiguously(problem: Problem) -> Problem:
    return replace(problem, objective="throughput", contiguous=True)


def freely(problem: Problem) -> Problem:
    return replace(problem, objective="throughput", contiguous=False)
