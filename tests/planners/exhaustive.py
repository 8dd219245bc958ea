"""The shortest step of tiny graphs by trying everything: all placements, all orders of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from typing import Any

import numpy as np
from hypothesis import strategies as st
from simulate.problems import problems

from hocket.graph import Graph, Role
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.verify import structure_violations
from hocket.simulate.engine import simulate
from hocket.simulate.lowering import owner_devices
from hocket.simulate.verify import update_violations


@st.composite
def constrained_problems(draw: Any, max_ops: int, max_devices: int, mode: str | None = None) -> Any:
    """Generated problems with groups and with ops that some kinds of device cannot run."""
    problem = draw(problems(max_ops=max_ops, max_devices=max_devices, mode=mode))
    num_ops, num_kinds = problem.graph.num_ops, len(problem.costs.kind_names)
    labels = st.sampled_from([-1, -1, -1, 0, 1])
    group = np.array(draw(st.lists(labels, min_size=num_ops, max_size=num_ops)), dtype=np.int32)
    op_s = problem.costs.op_s.copy()
    if num_kinds > 1 and draw(st.booleans()):
        barred = st.sampled_from([False, False, False, True])
        flags = draw(st.lists(barred, min_size=num_ops, max_size=num_ops))
        op_s[0, np.array(flags)] = np.inf
    graph = replace(problem.graph, group=group)
    return replace(problem, work=graph, op_costs=replace(problem.costs, op_s=op_s))


def legal_placements(problem: Problem) -> Iterator[np.ndarray]:
    """All placements whose structure and updates are legal; memory is not looked at."""
    num_ops, num_devices = problem.graph.num_ops, problem.cluster.num_devices
    for devices in product(range(num_devices), repeat=num_ops):
        device_of = np.array(devices, dtype=np.int32)
        broken = chain(
            structure_violations(Plan().placing(device_of), problem),
            update_violations(device_of, problem),
        )
        if next(broken, None) is None:
            yield device_of


def topological_orders(graph: Graph) -> Iterator[list[int]]:
    """All of them."""
    src, dst = graph.edges
    needs = [set(src[dst == op].tolist()) for op in range(graph.num_ops)]

    def extend(done: list[int]) -> Iterator[list[int]]:
        if len(done) == graph.num_ops:
            yield done
        for op in range(graph.num_ops):
            if op not in done and needs[op] <= set(done):
                yield from extend([*done, op])

    return extend([])


def shortest_step_s(problem: Problem) -> float:
    """The shortest step over all legal plans, each simulated; infinite where there is none."""
    best = np.inf
    usable = problem.memory_bytes
    orders = list(topological_orders(problem.graph))
    for device_of in legal_placements(problem):
        seen = set()
        for order in orders:
            per_device = tuple(
                tuple(op for op in order if device_of[op] == device)
                for device in range(problem.cluster.num_devices)
            )
            if per_device in seen:
                continue
            seen.add(per_device)
            lists = tuple(np.array(ops, dtype=np.int32) for ops in per_device)
            timeline = simulate(problem, Plan().placing(device_of, by_device=lists))
            if np.all(timeline.peak_bytes <= usable):
                best = min(best, timeline.makespan_s)
    return best


def shortest_parallel_step_s(problem: Problem) -> float:
    """As `shortest_step_s` for transfers that do not notice each other and ample memory.

    Ops are put one after another behind what their device runs already; a branch that is as long
    as the best known plan is not followed.
    """
    best = np.inf
    for device_of in legal_placements(problem):
        best = _shortest_parallel_order_s(problem, device_of, best)
    return best


def _shortest_parallel_order_s(problem: Problem, device_of: np.ndarray, best: float) -> float:
    """The shortest step of one placement, if it is below ``best``; else ``best``."""
    graph, devices = problem.graph, device_of.tolist()
    src, dst = graph.edges
    needs = [src[dst == op].tolist() for op in range(graph.num_ops)]
    arrival = _arrivals(problem, device_of)
    seconds = problem.costs.op_s[problem.costs.device_row[device_of], np.arange(len(devices))]

    def follow(end: dict[int, float], free: list[float], latest: float) -> None:
        nonlocal best
        if latest >= best:
            return
        if len(end) == graph.num_ops:
            best = latest
            return
        for op, device in enumerate(devices):
            if op in end or any(need not in end for need in needs[op]):
                continue
            arrivals = [end.get(maker, 0.0) + delay for maker, delay in arrival[op]]
            done = max([free[device], *arrivals]) + seconds[op]
            further = [done if d == device else t for d, t in enumerate(free)]
            follow(end | {op: done}, further, max(latest, done))

    follow({}, [0.0] * problem.cluster.num_devices, 0.0)
    return best


def _arrivals(problem: Problem, device_of: np.ndarray) -> list[list[tuple[int, float]]]:
    """Per op: the maker of each tensor that it reads, -1 for none, and the transfer's seconds."""
    graph, homes = problem.graph, owner_devices(problem.graph, device_of)
    found: list[list[tuple[int, float]]] = []
    for op in range(graph.num_ops):
        reads = []
        for tensor in graph.reads_of(op).tolist():
            maker = int(graph.tensor_producer[tensor])
            is_batch = maker < 0 and graph.tensor_role[tensor] == Role.INPUT
            delay = problem.costs.transfer_s(tensor, homes[tensor], device_of[op])
            reads.append((maker, 0.0 if is_batch else delay))
        found.append(reads)
    return found
