"""What calls of modules were given: the code that made them has it until they return.

A container such as ``layer1`` of a residual net reads its input in its first block and is called
for all of them, and Python's frames hold what they were called with. So the forward pass holds the
inputs of modules and of those around them to the end of each call. O(ops · depth of modules).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import BoolArray, LongArray, spans
from hocket.graph.graph import Graph
from hocket.simulate.rewriting.calls import Span, calls_of, outer_modules
from hocket.simulate.rewriting.visits import StepVisits, uncalled_lists


def held_by_calls(
    graph: Graph, visits: StepVisits, num_forward: int, is_forward: BoolArray
) -> LongArray:
    """Pairs of a call's last op and a tensor that it was given, of tensors ``is_forward``."""
    found = [np.zeros((0, 2), dtype=np.int64)]
    for start, stop in _calls(graph, visits, num_forward):
        at, _ = spans(graph.read_ptr, np.arange(start, stop))
        read = np.unique(graph.reads[at].astype(np.int64))
        given = read[is_forward[read] & (graph.tensor_producer[graph.root_of[read]] < start)]
        found.append(np.stack([np.full(len(given), stop - 1), given], axis=1))
    return np.concatenate(found)


def _calls(graph: Graph, visits: StepVisits, num_forward: int) -> list[Span]:
    """Of visited modules and of those around them that are called."""
    modules = dict.fromkeys(visit.module for visit in visits.visits if visit.module)
    uncalled = uncalled_lists(graph)
    around = dict.fromkeys(outer for path in modules for outer in outer_modules(path))
    return [(visit.start, visit.stop) for visit in visits.visits] + [
        call
        for path in around
        if path not in uncalled
        for call in calls_of(graph, path, num_forward)
    ]
