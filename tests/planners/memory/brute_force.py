"""The best order of a small graph by trying every set of ops that can have run; plain Python."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from hocket.graph import Graph


def held_after(graph: Graph, has_run: frozenset[int]) -> int:
    """Bytes that ops made and that are held when exactly these ops have run."""
    total = 0
    for owner in range(graph.num_tensors):
        if graph.alias_of[owner] >= 0 or graph.tensor_producer[owner] < 0:
            continue
        if int(graph.tensor_producer[owner]) not in has_run:
            continue
        sharing = np.flatnonzero(graph.root_of == owner)
        users = {int(op) for tensor in sharing for op in graph.users_of(int(tensor))}
        if users - has_run or any(graph.is_held[tensor] for tensor in sharing):
            total += int(graph.tensor_bytes[owner])
    return total


def made_bytes(graph: Graph, op: int) -> int:
    """Bytes that an op takes when it starts."""
    made = sum(int(graph.held_bytes[tensor]) for tensor in graph.made_by(op))
    return made + int(graph.workspace_bytes[op])


def befores(graph: Graph) -> list[set[int]]:
    """Per op: those that must run before it."""
    found: list[set[int]] = [set() for _ in range(graph.num_ops)]
    for src, dst in zip(*graph.edges, strict=True):
        found[int(dst)].add(int(src))
    for first, second in pairwise(np.flatnonzero(graph.rng_order >= 0).tolist()):
        found[second].add(first)
    return found


def best_peak(graph: Graph) -> int:
    """The least peak of all orders, without what exists before the step."""
    before = befores(graph)
    states = {frozenset[int](): 0}
    for _ in range(graph.num_ops):
        following: dict[frozenset[int], int] = {}
        for has_run, peak in states.items():
            held = held_after(graph, has_run)
            for op in range(graph.num_ops):
                if op in has_run or before[op] - has_run:
                    continue
                now = max(peak, held + made_bytes(graph, op))
                key = has_run | {op}
                following[key] = min(now, following.get(key, now))
        states = following
    return min(states.values())
