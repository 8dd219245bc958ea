"""The graph of a step as autograd holds its tensors, where that is longer than they are read.

A capture notes which ops' nodes hold storages that no op of the backward pass reads. For a step of
the model itself these ops read them. O(reads).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hocket.base.arrays import pointers
from hocket.graph.graph import Graph

HELD = "held"
"""Note of a graph: names of tensors that an op's autograd node holds, by the op's name."""


def as_held(graph: Graph) -> Graph:
    """The graph in which ops read what their nodes hold."""
    noted = graph.meta.get(HELD)
    if not noted:
        return graph
    op_of = {name: op for op, name in enumerate(graph.op_names)}
    tensor_of = {name: tensor for tensor, name in enumerate(graph.tensor_names)}
    reader = graph.reader
    # A graph that was made of another has its note and may lack some of its ops.
    pairs = {
        (op_of[op], tensor_of[name])
        for op, names in noted.items()
        for name in names
        if op in op_of and name in tensor_of
    }
    every = sorted(pairs | {*zip(reader.tolist(), graph.reads.tolist(), strict=True)})
    ops, tensors = (np.array(column, dtype=np.int32) for column in zip(*every, strict=True))
    counts = np.bincount(ops, minlength=graph.num_ops)
    return replace(graph, read_ptr=pointers(counts), reads=tensors)
