"""Small generated problems and placements, for the tests of every room that plans or simulates."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from hocket.cost.costs import Costs, TimeSource, device_rows
from hocket.graph import Graph, GraphBuilder, Role, Stream
from hocket.hardware import Cluster, Device, DeviceKind, Link
from hocket.plan.plan import Plan
from hocket.plan.problem import TRANSFER_MODES, Problem

BEFORE_ROLES = (Role.PARAMETER, Role.OPTIMIZER_STATE, Role.BUFFER, Role.INPUT)
MADE_ROLES = (Role.ACTIVATION, Role.ACTIVATION, Role.GRADIENT, Role.OUTPUT, Role.CONTROL)


class Tape:
    """Choices read from drawn bytes, one byte each: one draw is many times cheaper than dozens.

    Bytes shrink towards 0, so the first alternative of each choice is the simplest.
    """

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def below(self, count: int) -> int:
        """A number from 0 on."""
        return next(self._bytes) % count

    def pick(self, values: Any) -> Any:
        """One of some values."""
        return values[self.below(len(values))]

    def some(self, values: list[int], most: int) -> list[int]:
        """At least one of some values, none twice; takes ``most`` + 1 bytes."""
        chosen = [self.pick(values) for _ in range(most)]
        return list(dict.fromkeys(chosen[: 1 + self.below(most)]))


def tape(draw: Any, num_bytes: int) -> Tape:
    """Room for so many choices."""
    return Tape(draw(st.binary(min_size=num_bytes, max_size=num_bytes)))


def numbers(draw: Any, count: int, values: Any) -> np.ndarray:
    """As many of some numbers as are asked for, in one draw."""
    drawn = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype=np.uint8)
    return np.asarray(values)[drawn % len(values)]


SIZES = (0, 1, 8, 24, 100)
DURATIONS = (0.0, 0.25, 0.5, 1.0, 1.0, 3.0, 0.1)
LATENCIES = (0.0, 0.0, 0.125, 0.7)
BANDWIDTHS = (1.0, 8.0, 10.0, 64.0)
_BYTES_PER_OP = 14
"""Choices of an op with two tensors, so that each op has a place of its own on the tape."""


@st.composite
def graphs(
    draw: Any, max_ops: int = 10, max_before: int = 4, *, has_streams: bool = False
) -> Graph:
    """Graphs with aliases, control tensors, unread tensors and every role."""
    builder = GraphBuilder("generated")
    start = tape(draw, 3 + 3 * max_before)
    streams = tuple(Stream) if has_streams and start.below(2) else (Stream.COMPUTE,)
    num_ops = start.pick([1, max_ops // 2, max_ops, max_ops])
    tensors: list[int] = []
    for index in range(start.below(max_before + 1)):
        base, role = start.pick([-1, -1, *tensors]), start.pick(BEFORE_ROLES)
        size = start.pick(SIZES)
        tensors.append(builder.tensor(f"before{index}", size, role=role, alias_of=base))
    content = draw(st.binary(min_size=num_ops * _BYTES_PER_OP, max_size=num_ops * _BYTES_PER_OP))
    for index in range(num_ops):
        choices = Tape(content[index * _BYTES_PER_OP : (index + 1) * _BYTES_PER_OP])
        has_reads = choices.below(4)
        reads = choices.some(tensors, 3) if tensors and has_reads else []
        workspace_bytes, stream = choices.pick(SIZES), choices.pick(streams)
        op = builder.op(f"op{index}", reads=reads, workspace_bytes=workspace_bytes, stream=stream)
        for number in range(choices.pick([1, 1, 0, 2])):
            base = choices.pick([-1, *reads])
            role = choices.pick(MADE_ROLES if base < 0 else (*MADE_ROLES, *BEFORE_ROLES))
            size = choices.pick((0,) if role == Role.CONTROL else SIZES)
            name = f"made{index}.{number}"
            tensors.append(builder.tensor(name, size, producer=op, role=role, alias_of=base))
    return builder.build()


@st.composite
def clusters(draw: Any, max_devices: int = 4) -> Cluster:
    """A bus, all pairs joined, a star around a switch, or two hosts joined by one link."""
    most_links = max(max_devices * (max_devices - 1) // 2, max_devices + 1)
    choices = tape(draw, 3 + max_devices + 2 * most_links)
    num = choices.pick([max_devices, *range(1, max_devices + 1)])
    kinds = [device_kind(name) for name in ("fast", "slow")]
    devices = tuple(
        device(f"gpu{index}", choices.pick(kinds), host=f"host{index % 2}") for index in range(num)
    )
    shape = choices.pick(["bus", "pairs", "star", "hosts"])
    duplex = choices.pick(["full", "half"])

    def link(name: str, *ends: str) -> Link:
        return Link(
            name=name,
            ends=ends,
            bandwidth_bps=choices.pick(BANDWIDTHS),
            latency_s=choices.pick(LATENCIES),
            duplex=duplex,
        )

    names = [spec.name for spec in devices]
    if shape == "bus" and num > 2:
        links = [link("bus", *names)]
    elif shape == "star":
        links = [link(f"to-{name}", name, "switch") for name in names]
    elif shape == "hosts":
        links = [link(f"to-{spec.name}", spec.name, spec.host) for spec in devices]
        links.append(link("network", "host0", "host1"))
    else:
        links = [link(f"{a}-{b}", a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    return Cluster(
        name=f"{num} on {shape}",
        devices=devices,
        hosts=("host0", "host1"),
        switches=("switch",),
        links=tuple(links),
    )


@st.composite
def problems(
    draw: Any,
    max_ops: int = 10,
    max_devices: int = 4,
    mode: str | None = None,
    *,
    has_streams: bool = False,
) -> Any:
    """A generated graph on a generated cluster at generated costs."""
    graph = draw(graphs(max_ops, has_streams=has_streams))
    cluster = draw(clusters(max_devices))
    num_kinds = len(cluster.kinds)
    op_s = numbers(draw, num_kinds * graph.num_ops, DURATIONS).reshape(num_kinds, graph.num_ops)
    choices = tape(draw, 2)
    transfers = mode or choices.pick(TRANSFER_MODES)
    tensor_s = None if choices.below(4) else numbers(draw, graph.num_tensors, DURATIONS)
    costs = costs_of(graph, cluster, op_s, tensor_s)
    return Problem(work=graph, cluster=cluster, op_costs=costs, transfers=transfers)


@st.composite
def placements(draw: Any, problem: Problem) -> np.ndarray:
    """A device for each op."""
    devices = np.arange(problem.cluster.num_devices, dtype=np.int32)
    return numbers(draw, problem.graph.num_ops, devices)


@st.composite
def plans(draw: Any, problem: Problem, orders: tuple[str, ...] = ("none", "priority", "order")):
    """A placement, and perhaps priorities or a strict order that cannot deadlock."""
    device_of = draw(placements(problem))
    num_ops = problem.graph.num_ops
    form = draw(st.sampled_from(orders))
    if form == "none":
        return Plan(planner="generated").placing(device_of)
    keys = numbers(draw, num_ops, (0.0, 1.0, 2.0, 3.0))
    if form == "priority":
        return Plan(planner="generated").placing(device_of, priority=keys)
    order = topological_order(problem.graph, keys.tolist())
    per_device = tuple(
        np.array([op for op in order if device_of[op] == device], dtype=np.int32)
        for device in range(problem.cluster.num_devices)
    )
    return Plan(planner="generated").placing(device_of, by_device=per_device)


def topological_order(graph: Graph, keys: list[float]) -> list[int]:
    """The topological order that takes the op with the smallest (key, index) first."""
    sources, targets = graph.edges
    needs = [set(sources[targets == op].tolist()) for op in range(graph.num_ops)]
    order: list[int] = []
    left = set(range(graph.num_ops))
    while left:
        op = min((o for o in left if needs[o] <= set(order)), key=lambda o: (keys[o], o))
        order.append(op)
        left.remove(op)
    return order


def device_kind(name: str = "gpu", memory_bytes: int = 2**30) -> DeviceKind:
    """A kind of device; only its name matters to the simulator."""
    return DeviceKind(
        name=name,
        memory_bytes=memory_bytes,
        peak_flops={"float32": 1e12},
        memory_bandwidth_bps=1e12,
    )


def device(name: str, kind: DeviceKind, host: str = "host0") -> Device:
    """A device with the memory of its kind."""
    return Device(name=name, kind=kind, host=host, memory_bytes=kind.memory_bytes)


def joined(num_devices: int, bandwidth_bps: float = 1.0, latency_s: float = 0.0) -> Cluster:
    """Equal devices, each pair joined by an own full-duplex link."""
    kind = device_kind()
    devices = tuple(device(f"gpu{index}", kind) for index in range(num_devices))
    links = tuple(
        Link(
            name=f"gpu{a}–gpu{b}",
            ends=(f"gpu{a}", f"gpu{b}"),
            bandwidth_bps=bandwidth_bps,
            latency_s=latency_s,
        )
        for a in range(num_devices)
        for b in range(a + 1, num_devices)
    )
    return Cluster(name="joined", devices=devices, hosts=("host0",), links=links)


def costs_of(
    graph: Graph, cluster: Cluster, op_s: Any, tensor_s: np.ndarray | None = None
) -> Costs:
    """Costs with the given op times: [kind, op], or [op] for all kinds."""
    rows = np.broadcast_to(np.asarray(op_s, dtype=np.float64), (len(cluster.kinds), graph.num_ops))
    return Costs(
        kind_names=tuple(kind.name for kind in cluster.kinds),
        op_s=rows,
        op_source=np.full(rows.shape, TimeSource.FILE, dtype=np.uint8),
        device_row=device_rows(cluster),
        routes=cluster.routes,
        tensor_bytes=graph.tensor_bytes,
        tensor_s=tensor_s,
        reserved_bytes=np.zeros(len(rows), dtype=np.int64),
        settings={},
    )


def problem_of(graph: Graph, cluster: Cluster, op_s: Any, transfers: Any = "shared") -> Problem:
    """A problem with the given op times."""
    costs = costs_of(graph, cluster, op_s)
    return Problem(work=graph, cluster=cluster, op_costs=costs, transfers=transfers)
