"""Ops of a wave that count where a recording is matched with the graph of a plan.

Views do not: which of them there are depends on how parameters lie in memory. cuDNN's layers look
at all their weights as one buffer where these lie in one storage, as they do on the device, and not
where they are separate. A view does nothing and makes nothing, so it is carried out with the op
before it, or those before all with the first. O(ops).
"""

from __future__ import annotations

from functools import lru_cache

from hocket.graph.graph import Graph
from hocket.simulate.shares.lanes import pass_order


@lru_cache(maxsize=64)
def counted_ops(graph: Graph) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Ops of a forward and backward pass that are no views, in order, each with all that is carried
    out in its place."""
    found: list[tuple[int, list[int]]] = []
    early: list[int] = []
    for op in pass_order(graph).tolist():
        if not graph.only_looks[op]:
            found.append((op, [*early, op]))
            early = []
        elif found:
            found[-1][1].append(op)
        else:
            early.append(op)
    return tuple((op, tuple(calls)) for op, calls in found)
