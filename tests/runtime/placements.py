"""Random placements that break no law: every op anywhere, except what must share a device."""

import numpy as np

from hocket.graph.graph import PERSISTENT_ROLES


def random_placement(graph, num_devices, seed):
    """A device for each op, drawn for each set of ops that must stay together."""
    leader = list(range(graph.num_ops))

    def find(op):
        while leader[op] != op:
            op = leader[op]
        return op

    def tie(a, b):
        leader[max(find(a), find(b))] = min(find(a), find(b))

    first_of_group = {}
    first_reader = {}
    for op in range(graph.num_ops):
        if graph.group[op] >= 0:
            tie(first_of_group.setdefault(int(graph.group[op]), op), op)
        for tensor in graph.reads_of(op).tolist():
            first_reader.setdefault(int(graph.root_of[tensor]), op)
    for tensor in range(graph.num_tensors):
        root, producer = int(graph.root_of[tensor]), int(graph.tensor_producer[tensor])
        is_version = graph.tensor_role[tensor] in PERSISTENT_ROLES and producer >= 0
        if is_version and graph.tensor_producer[root] < 0:
            tie(first_reader[root], producer)
    drawn = np.random.default_rng(seed).integers(0, num_devices, graph.num_ops)
    return np.array([drawn[find(op)] for op in range(graph.num_ops)], dtype=np.int32)
