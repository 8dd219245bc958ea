"""Training steps and clusters for tests of `spread-memory`: just enough memory, or too little."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from simulate.problems import joined, problem_of

from hocket.graph import Graph, GraphBuilder, Phase, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.simulate.engine import simulate

PROMISED = 0.92
"""Share of all memory that a step may need and still gets a plan."""


@st.composite
def training_steps(draw: Any, min_layers: int = 12) -> Graph:
    """A chain of layers with skips: forward, backward and optimizer ops, every size drawn."""
    builder = GraphBuilder("training")
    num_layers = draw(st.integers(min_layers, min_layers + 12))
    sizes = st.sampled_from([0, 40, 60, 80, 100])
    x = builder.tensor("x", 20, role=Role.INPUT)
    outputs, inputs, weights, forward = [x], [], [], []
    for layer in range(num_layers):
        reads = {outputs[-1], outputs[draw(st.integers(max(0, layer - 3), layer))]}
        weights.append(builder.tensor(f"w{layer}", draw(sizes), role=Role.PARAMETER))
        op = builder.op(
            f"f{layer}", reads=[*sorted(reads), weights[-1]], workspace_bytes=draw(sizes) // 4
        )
        forward.append(op)
        inputs.append(sorted(reads))
        outputs.append(builder.tensor(f"y{layer}", draw(sizes), producer=op))
    gradients: dict[int, list[int]] = {outputs[-1]: []}
    size_of = {x: 20}
    for layer in reversed(range(num_layers)):
        incoming = gradients.get(outputs[layer + 1], [])
        op = builder.op(
            f"b{layer}",
            reads=[*incoming, *inputs[layer], weights[layer]],
            phase=Phase.BACKWARD,
            partner=forward[layer],
        )
        for tensor in inputs[layer]:
            made = builder.tensor(f"g{layer}.{tensor}", size_of.get(tensor, 40), producer=op)
            gradients.setdefault(tensor, []).append(made)
        gradient = builder.tensor(f"wg{layer}", 60, producer=op, role=Role.GRADIENT)
        state = builder.tensor(f"s{layer}", 120, role=Role.OPTIMIZER_STATE)
        update = builder.op(
            f"o{layer}", reads=[weights[layer], gradient, state], phase=Phase.OPTIMIZER
        )
        builder.tensor(
            f"w{layer}'", 0, producer=update, role=Role.PARAMETER, alias_of=weights[layer]
        )
    return builder.build()


def need_bytes(problem: Problem) -> int:
    """Peak of the whole step on one device."""
    alone = Plan().placing(np.zeros(problem.graph.num_ops, dtype=np.int32))
    return int(simulate(problem, alone).peak_bytes[0])


def with_memory(problem: Problem, memory_bytes: list[int]) -> Problem:
    """The same problem with that much usable memory on each device."""
    reserved = problem.costs.reserved_bytes[problem.costs.device_row]
    devices = tuple(
        replace(device, memory_bytes=int(size) + int(kept) + device.kind.headroom_bytes)
        for device, size, kept in zip(problem.cluster.devices, memory_bytes, reserved, strict=True)
    )
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def tight(problem: Problem, shares: tuple[int, ...], filled: float = PROMISED) -> Problem:
    """The problem with so little memory that the step needs ``filled`` of it, split by shares."""
    total = need_bytes(problem) / filled
    return with_memory(problem, [int(np.ceil(total * s / sum(shares))) for s in shares])


def on_joined(graph: Graph, num_devices: int) -> Problem:
    """The graph on equal devices joined in pairs, every op a second."""
    return problem_of(graph, joined(num_devices, bandwidth_bps=1000.0), np.ones(graph.num_ops))


def ledger_peaks(problem: Problem, device_of: Any, spans: Any) -> list[int]:
    """Plain twin of the ledger: peak of each device on the given axis."""
    graph, last = problem.graph, spans.num_instants - 1
    held = np.zeros((problem.cluster.num_devices, spans.num_instants), dtype=np.int64)
    ends: dict[tuple[int, int], int] = {}
    home: dict[int, int] = {}

    def keep(tensor: int, device: int, until: int) -> None:
        ends[tensor, device] = max(ends.get((tensor, device), -1), until)

    def is_before(tensor: int) -> bool:
        return bool(graph.tensor_producer[tensor] < 0)

    for op in range(graph.num_ops):
        for tensor in graph.reads_of(op):
            if is_before(tensor):
                home.setdefault(int(graph.root_of[tensor]), int(device_of[op]))
    for op in range(graph.num_ops):
        device = int(device_of[op])
        held[device, spans.first[op] : spans.last[op] + 1] += graph.workspace_bytes[op]
        for tensor in graph.reads_of(op).tolist():
            stays = False
            if is_before(tensor):
                tensor = int(graph.root_of[tensor])
                stays = graph.tensor_role[tensor] == Role.INPUT or home[tensor] == device
            keep(tensor, device, last if stays else int(spans.last[op]))
        for tensor in graph.made_by(op):
            stays = bool(graph.is_held[tensor])
            keep(tensor, device, last if stays else max(spans.last[op], spans.sent[tensor]))
    for (tensor, device), end in sorted(ends.items(), reverse=True):
        end = ends[tensor, device]
        producer = int(graph.tensor_producer[tensor])
        is_here = producer >= 0 and device_of[producer] == device
        if is_here and graph.alias_of[tensor] >= 0:
            base = int(graph.alias_of[tensor])
            keep(int(graph.root_of[base]) if is_before(base) else base, device, end)
            continue
        begin = 0 if producer < 0 else spans.first[producer]
        if producer >= 0 and not is_here:
            begin = min(spans.last[producer] + 1, last)
        held[device, begin : end + 1] += graph.tensor_bytes[tensor]
    return held.max(axis=1).tolist()
