"""Place the ops of another step of the same model: another shape of batch, or no gradients.

Where both have the same ops, each goes where it went. Else an op goes where the op of its name
went, or where most ops of its module are, or where its input is. Ops that must share a device
follow the first of them. O(ops + reads).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.graph import Graph


def placed_like(graph: Graph, planned: Graph, device_of: IntArray) -> IntArray:
    """A device for each op of ``graph``, as ``device_of`` has them for ``planned``."""
    if graph.op_names == planned.op_names and np.array_equal(graph.group, planned.group):
        return device_of
    by_name = dict(zip(planned.op_names, device_of.tolist(), strict=True))
    by_module: dict[str, Counter[int]] = {}
    for op, device in enumerate(device_of.tolist()):
        by_module.setdefault(planned.module_of(op), Counter())[device] += 1
    found: list[int] = []
    leader: dict[int, int] = {}
    for op in range(graph.num_ops):
        group = int(graph.group[op])
        if group in leader:
            found.append(leader[group])
            continue
        found.append(_place(graph, op, by_name, by_module, found))
        if group >= 0:
            leader[group] = found[-1]
    return np.array(found, dtype=np.int32)


def _place(
    graph: Graph,
    op: int,
    by_name: dict[str, int],
    by_module: dict[str, Counter[int]],
    found: list[int],
) -> int:
    name = graph.op_names[op]
    if name in by_name:
        return by_name[name]
    module = graph.module_of(op)
    if module in by_module:
        return by_module[module].most_common(1)[0][0]
    makers = (int(graph.tensor_producer[tensor]) for tensor in graph.reads_of(op).tolist())
    return next((found[maker] for maker in makers if maker >= 0), 0)
