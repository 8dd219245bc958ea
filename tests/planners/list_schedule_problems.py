"""Problems that are hard on list scheduling: groups, aliases, updates, unequal devices, no room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from planners.golden import EXAMPLE_A, EXAMPLE_B
from simulate.problems import costs_of, device, device_kind, numbers, problems, tape

from hocket.graph import Graph, GraphBuilder, Role
from hocket.hardware import Cluster, Link
from hocket.plan.problem import TRANSFER_MODES, Problem

# The simulator sends what one op makes in order of tensors; op 6 needs its own first.
HANEN = replace(EXAMPLE_B, transfer_s={"36": 1, **EXAMPLE_B.transfer_s})

PUBLISHED = [
    (EXAMPLE_A, 2, 100, 8),
    (EXAMPLE_A, 2, 5, 9),
    (HANEN, 2, 100, 36),
    (HANEN, 3, 100, 29),
]
"""Example, devices, bytes per device and the shortest step, which m-ETF and m-SCT find."""


@st.composite
def hard_problems(draw: Any, max_ops: int = 10) -> Problem:
    """Generated problems with groups, ops that some kinds cannot run, and little memory."""
    problem = draw(problems(max_ops=max_ops))
    graph, op_s = problem.graph, problem.costs.op_s.copy()
    group = numbers(draw, graph.num_ops, (-1, -1, 0, 7))
    choices = tape(draw, 3)
    if choices.below(2):
        op_s[choices.below(len(op_s)), choices.below(graph.num_ops)] = np.inf
    memory = numbers(draw, problem.cluster.num_devices, (2**30, 2**30, 400, 250, 150, 60)).tolist()
    devices = tuple(
        replace(one, memory_bytes=size)
        for one, size in zip(problem.cluster.devices, memory, strict=True)
    )
    return replace(
        problem,
        work=replace(graph, group=group.astype(np.int32)),
        cluster=replace(problem.cluster, devices=devices),
        op_costs=replace(problem.costs, op_s=op_s),
    )


BEFORE_ROLES = (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.BUFFER, Role.INPUT)
MADE_ROLES = (*[Role.ACTIVATION] * 4, Role.GRADIENT, Role.OUTPUT, Role.CONTROL)


def random_graph(random: np.random.Generator, num_ops: int) -> Graph:
    """A graph with aliases, updates and every role, larger than what hypothesis draws quickly."""
    builder, tensors = GraphBuilder("random"), list[int]()

    def tensor(name: str, role: Role, alias_of: int, **made_by: int) -> None:
        size = 0 if role == Role.CONTROL else int(random.choice([0, 8, 24, 100]))
        tensors.append(builder.tensor(name, size, role=role, alias_of=alias_of, **made_by))

    for index in range(random.integers(0, 6)):
        base = int(random.choice([-1, -1, -1, *tensors]))
        tensor(f"before{index}", BEFORE_ROLES[random.integers(4)], base)
    for index in range(num_ops):
        pool = tensors if random.random() < 0.3 else tensors[-8:]
        count = min(len(pool), int(random.integers(0, 4)))
        reads = sorted({int(t) for t in random.choice(pool, count)}) if count else []
        op = builder.op(f"op{index}", reads=reads, workspace_bytes=int(random.choice([0, 8, 30])))
        for number in range(random.integers(0, 3)):
            base = int(random.choice([-1, -1, *reads]))
            roles = MADE_ROLES if base < 0 else (*MADE_ROLES, Role.PARAMETER)
            tensor(f"made{index}.{number}", roles[random.integers(len(roles))], base, producer=op)
    return builder.build()


def random_problem(random: np.random.Generator, num_ops: int) -> Problem:
    """A random graph on up to five unequal devices behind a switch, often short of memory."""
    graph = random_graph(random, num_ops)
    if random.random() < 0.5:
        group = random.choice([-1, -1, -1, 0, 1, 5], graph.num_ops)
        graph = replace(graph, group=group.astype(np.int32))
    kinds = [device_kind(name) for name in ("fast", "slow")]
    devices = [
        replace(
            device(f"gpu{index}", kinds[random.integers(2)]),
            memory_bytes=int(random.choice([2**30, 2**30, 1500, 800, 400, 250])),
        )
        for index in range(random.integers(1, 6))
    ]
    duplex = ("full", "half")[random.integers(2)]
    links = tuple(
        Link(
            name=spec.name,
            ends=(spec.name, "switch"),
            bandwidth_bps=float(random.choice([10.0, 64.0, 200.0])),
            latency_s=float(random.choice([0.0, 0.0, 0.125])),
            duplex=duplex,
        )
        for spec in devices
    )
    cluster = Cluster(
        name="star", devices=tuple(devices), hosts=("host0",), switches=("switch",), links=links
    )
    op_s = random.choice([0.0, 0.25, 0.5, 1.0, 1.0, 3.0, 0.1], (len(cluster.kinds), num_ops))
    if random.random() < 0.2:
        op_s[random.integers(len(op_s)), random.integers(num_ops)] = np.inf
    transfers = TRANSFER_MODES[random.integers(3)]
    costs = costs_of(graph, cluster, op_s)
    return Problem(work=graph, cluster=cluster, op_costs=costs, transfers=transfers)


def random_favourites(random: np.random.Generator, graph: Graph) -> tuple[Any, Any]:
    """A random matching of the edges, and how long devices wait for each."""
    favourite, taken = np.full(graph.num_ops, -1, dtype=np.int32), set[int]()
    for src, dst in zip(*(ends.tolist() for ends in graph.edges), strict=True):
        if favourite[src] < 0 and dst not in taken and random.random() < 0.7:
            favourite[src] = dst
            taken.add(dst)
    return favourite, random.choice([0.0, 0.5, 3.0], graph.num_ops)
