"""What the oracle of the list schedulers knows of a graph before it starts, in plain Python."""

from __future__ import annotations

from collections import deque

from hocket.graph import Graph, Role

PERSISTENT = {Role.PARAMETER, Role.OPTIMIZER_STATE, Role.BUFFER, Role.INPUT}


def root_of(graph: Graph, tensor: int) -> int:
    while graph.alias_of[tensor] >= 0:
        tensor = int(graph.alias_of[tensor])
    return tensor


def in_breadth_first_order(graph: Graph) -> list[int]:
    needs = [
        {int(p) for p in graph.tensor_producer[graph.reads_of(op)] if p >= 0}
        for op in range(graph.num_ops)
    ]
    queue = deque(op for op in range(graph.num_ops) if not needs[op])
    order: list[int] = []
    while queue:
        op = queue.popleft()
        order.append(op)
        for other in range(graph.num_ops):
            if op in needs[other]:
                needs[other].remove(op)
                if not needs[other]:
                    queue.append(other)
    return order


def tied_ops(graph: Graph) -> list[set[int]]:
    """Ops that share a device: groups, and updates with the first reader of what they update."""
    ties = [{op} for op in range(graph.num_ops)]

    def tie(a: int, b: int) -> None:
        joined = ties[a] | ties[b]
        for op in joined:
            ties[op] = joined

    for a in range(graph.num_ops):
        for b in range(a):
            if graph.group[a] == graph.group[b] >= 0:
                tie(a, b)
    for tensor in range(graph.num_tensors):
        root, maker = root_of(graph, tensor), int(graph.tensor_producer[tensor])
        if graph.tensor_role[tensor] not in PERSISTENT or maker < 0:
            continue
        if graph.tensor_producer[root] >= 0:
            continue
        readers = [
            op
            for op in range(graph.num_ops)
            for t in graph.reads_of(op)
            if graph.tensor_producer[t] < 0 and root_of(graph, int(t)) == root
        ]
        tie(maker, min(readers))
    return ties
