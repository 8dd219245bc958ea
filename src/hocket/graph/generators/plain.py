"""Plain forward ops of random size, for families that differ only in the shape of the graph.

Sizes are integers from a frozen random stream, so that a seed gives the same graph on every machine
and with every version of numpy. O(ops).
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.generators.batch import BatchBuilder, Numbers
from hocket.graph.graph import Role


def chance(seed: int) -> np.random.RandomState:
    """Return a random generator whose stream numpy guarantees never to change."""
    return np.random.RandomState(seed)


def add_plain_ops(
    builder: BatchBuilder, num_ops: int, source: np.random.RandomState
) -> tuple[Numbers, Numbers]:
    """Add ops in order, each with an output and about half of them with a parameter.

    Returns the numbers of the ops and of their outputs.
    """
    output_bytes = _sizes(source, num_ops)
    # From an addition, one operation per four bytes, to a matrix product with 256 per byte.
    flops = output_bytes * ((1 << source.randint(0, 11, num_ops)) / 4)
    names = [f"op{i}" for i in range(num_ops)]
    ops = builder.ops(names, "op", position=np.arange(num_ops), flops=flops)
    outputs = builder.tensors([f"{name}.out" for name in names], output_bytes, producer=ops)
    with_weight = ops[source.randint(0, 2, num_ops) == 1]
    weights = builder.tensors(
        [f"op{i}.weight" for i in with_weight.tolist()],
        _sizes(source, len(with_weight)),
        role=Role.PARAMETER,
    )
    builder.reads(with_weight, weights)
    return ops, outputs


def _sizes(source: np.random.RandomState, count: int) -> LongArray:
    """Random bytes from 4 KiB to 15 MiB, spread over the powers of two as in real steps."""
    mantissa = source.randint(1, 16, count).astype(np.int64)
    return mantissa << source.randint(12, 21, count).astype(np.int64)
