"""Generated tiny problems whose memory is so tight that few plans fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from simulate.problems import costs_of, device, device_kind

from hocket.graph import Graph, GraphBuilder, Role
from hocket.hardware import Cluster, Link
from hocket.plan.plan import Plan
from hocket.plan.problem import TRANSFER_MODES, Problem
from hocket.simulate.engine import simulate


def tight_problem(seed: int, num_ops: int, num_devices: int = 2) -> Problem:
    """A random graph on devices that have little more, or less, than a random plan needs of them.

    Ops of no length, aliases, workspaces, unequal devices, held results and parameters occur.
    """
    random = np.random.default_rng(seed)
    graph = _graph(random, num_ops)
    cluster = _cluster(random, num_devices)
    fast_s = random.choice([0.0, 1.0, 2.0, 3.0, 5.0, 8.0], graph.num_ops)
    slow_s = fast_s * random.choice([1.0, 2.0, 2.5])
    costs = costs_of(graph, cluster, np.array([fast_s, slow_s])[: len(cluster.kinds)])
    mode = TRANSFER_MODES[seed % len(TRANSFER_MODES)]
    problem = Problem(work=graph, cluster=cluster, op_costs=costs, transfers=mode)
    placed = random.integers(0, num_devices, graph.num_ops).astype(np.int32)
    peaks = simulate(problem, Plan().placing(placed)).peak_bytes
    memory = int(peaks.max() * random.uniform(0.7, 1.1))
    devices = tuple(replace(spec, memory_bytes=memory) for spec in cluster.devices)
    return replace(problem, cluster=replace(cluster, devices=devices))


def _graph(random: np.random.Generator, num_ops: int) -> Graph:
    builder = GraphBuilder("tight")
    tensors = [
        builder.tensor(f"p{index}", int(random.integers(5, 30)), role=role)
        for index, role in enumerate(random.choice([Role.PARAMETER, Role.INPUT, Role.BUFFER], 3))
    ]
    for index in range(num_ops):
        count = min(int(random.integers(1, 4)), len(tensors))
        near = tensors[-6:]
        reads = sorted(random.choice(near, min(count, len(near)), replace=False).tolist())
        workspace = int(random.choice([0, 0, 4, 8]))
        op = builder.op(f"op{index}", reads=reads, workspace_bytes=workspace)
        for number in range(int(random.choice([1, 1, 1, 2]))):
            base = int(random.choice([-1, -1, -1, -1, reads[-1]]))
            role = random.choice([Role.ACTIVATION, Role.ACTIVATION, Role.OUTPUT])
            size = int(random.integers(3, 45))
            name = f"t{index}.{number}"
            tensors.append(builder.tensor(name, size, producer=op, role=role, alias_of=base))
    return builder.build()


def _cluster(random: np.random.Generator, num_devices: int) -> Cluster:
    kinds = [device_kind("fast"), device_kind("slow")]
    is_mixed = bool(random.integers(0, 2))
    devices = tuple(
        device(f"gpu{index}", kinds[index % 2 if is_mixed else 0]) for index in range(num_devices)
    )
    bandwidth, latency = float(random.choice([10.0, 40.0])), float(random.choice([0.0, 0.25]))
    names = [spec.name for spec in devices]
    links = tuple(
        Link(name=f"{a}-{b}", ends=(a, b), bandwidth_bps=bandwidth, latency_s=latency)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
    )
    return Cluster(name="tight", devices=devices, hosts=("host0",), links=links)
