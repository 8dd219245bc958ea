"""Forward ops of each call of a module, for modules that a step calls more than once.

The graph records the module of each op, and how often a step calls each module; the starts of calls
follow from both. If other ops separate the calls, each run of the module's ops is one call.
Consecutive calls are split where the same ops of the same modules repeat; only the first call may
have additional views, such as transposed weights, which later calls reuse. O(ops).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, LongArray
from hocket.graph.graph import Graph

CALLS = "calls"
"""Key of a graph's metadata: number of calls per step, by path, of modules called more than
once."""

Span = tuple[int, int]
"""The first op of a call, and the op after its last."""


def outer_modules(path: str) -> list[str]:
    """Modules that contain a module, innermost first."""
    parts = path.split(".")[:-1]
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def num_calls(graph: Graph, path: str) -> int:
    """Return the number of calls of a module in the forward pass of a step."""
    noted: int = graph.meta.get(CALLS, {}).get(path, 1)
    return noted


def calls_of(graph: Graph, path: str, num_forward: int) -> list[Span]:
    """Return the calls of a module; empty if their starts cannot be determined."""
    inside = np.array([path in (each, *outer_modules(each)) for each in (*graph.modules, "")])
    own: LongArray = np.flatnonzero(inside[graph.op_module[:num_forward]])
    starts: LongArray = np.flatnonzero(np.diff(own, prepend=-2) > 1)
    count = num_calls(graph, path)
    if len(starts) != count:
        apart, starts = starts, _repeats(graph, own, count)
        # If other ops separate some calls, the repeats must start there, too; some modules have no
        # ops.
        if not len(starts) or not np.isin(apart, starts).all():
            return []
    stops = np.append(starts[1:], len(own)) - 1
    return list(zip(own[starts].tolist(), (own[stops] + 1).tolist(), strict=True))


def _repeats(graph: Graph, own: LongArray, count: int) -> LongArray:
    """Return the positions among a module's ops at which equal sequences begin, ``count`` in all.

    Returns an empty array if the ops do not repeat.
    """
    what = np.stack([graph.op_module[own], graph.op_kind[own]], axis=1)
    making = np.flatnonzero(_makes(graph)[own])
    num_made, left = divmod(len(making), count)
    made = what[making].reshape(count, -1, 2) if num_made and not left and count > 1 else what[:0]
    if len(made) and (made == made[0]).all():
        for start in range(int(making[num_made - 1]) + 1, int(making[num_made]) + 1):
            length, left = divmod(len(own) - start, count - 1)
            is_alike = (what[[0, start - 1], 0] == what[[start, -1], 0]).all()
            if not left and is_alike and (what[start:-length] == what[start + length :]).all():
                return np.array([0, *range(start, len(own), length)])
    return np.zeros(0, dtype=np.int64)


def _makes(graph: Graph) -> BoolArray:
    """Per op: True if it makes a tensor that is not a view."""
    is_own = (graph.tensor_producer >= 0) & (graph.root_of == np.arange(graph.num_tensors))
    found = np.zeros(graph.num_ops, dtype=bool)
    found[graph.tensor_producer[is_own]] = True
    return found
