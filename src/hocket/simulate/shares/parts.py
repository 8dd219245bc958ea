"""Which gradients microbatches add up, and what comes once after that."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hocket.base.arrays import IntArray
from hocket.graph.graph import Graph
from hocket.simulate.shares.order import stages_of
from hocket.simulate.shares.prices import gradients_of

_SUM = "aten.add"


@lru_cache(maxsize=64)
def added_parts(graph: Graph, cuts: tuple[int, ...]) -> tuple[IntArray, IntArray]:
    """What is added up over microbatches, and the ops that come once after it.

    Of a weight that two stages use, each adds up its own part of the gradient, and the parts meet
    once per step: else a gradient would travel with every microbatch.
    """
    gradients, stage = gradients_of(graph), stages_of(graph, cuts)
    maker = graph.tensor_producer[gradients]
    parts: list[int] = []
    finals: list[int] = []
    for gradient, op in zip(gradients.tolist(), maker.tolist(), strict=True):
        reads = graph.reads_of(op)
        sources = graph.tensor_producer[reads]
        is_sum = graph.kind_of(op) == _SUM and len(reads) > 1 and bool((sources >= 0).all())
        if is_sum and bool((stage[sources] != stage[op]).any()):
            parts += reads.tolist()
            finals.append(op)
        else:
            parts.append(gradient)
    return np.array(parts, dtype=np.int32), np.array(finals, dtype=np.int32)
