"""Forward graphs of ops of random size that differ only in shape: chain, layered, series-parallel.

Random numbers come from a stream that numpy guarantees never to change, so that a seed gives the
same graph on every machine and with every version of numpy. O(ops), series-parallel O(ops log ops)
expected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from hocket.graph.build import GraphBuilder
from hocket.graph.graph import Graph, Role

_MAX_WIDTH = 64
_MAX_INPUTS = 3
_BACK = np.array([1, 1, 1, 1, 1, 1, 2, 3])
"""Distances in layers that an input of a layered graph may span, drawn with equal probability."""


def chain(num_ops: int, seed: int) -> Graph:
    """A chain of exactly ``num_ops`` ops: each op reads the output of the one before."""
    plain = _plain_ops("chain", num_ops, np.random.RandomState(seed))
    for op in range(1, num_ops):
        plain.read(op, op - 1)
    return finished(plain, family="chain", num_ops=num_ops, seed=seed)


def layered(num_ops: int, seed: int) -> Graph:
    """A layered graph of exactly ``num_ops`` ops, as wide as deep up to 64 ops per layer.

    Each op reads one to three ops of earlier layers: most from the layer directly before, some from
    up to three layers back, like skip connections.
    """
    source = np.random.RandomState(seed)
    plain = _plain_ops("layered", num_ops, source)
    width = min(_MAX_WIDTH, max(1, math.isqrt(num_ops)))
    later = np.arange(width, num_ops)
    num_inputs = source.randint(1, _MAX_INPUTS + 1, len(later))
    for index in range(_MAX_INPUTS):
        # Never before the first layer.
        back = np.minimum(_BACK[source.randint(0, len(_BACK), len(later))], later // width)
        picked = (later // width - back) * width + source.randint(0, width, len(later))
        reading = num_inputs > index
        for reader, producer in zip(later[reading].tolist(), picked[reading].tolist(), strict=True):
            plain.read(reader, producer)
    return finished(plain, family="layered", num_ops=num_ops, seed=seed)


def series_parallel(num_ops: int, seed: int) -> Graph:
    """A series-parallel graph of exactly ``num_ops`` ops with one source and one sink.

    A span of ops is divided into two spans in series, or into a fork, two to four parallel spans
    and a join, until three or fewer ops are left.
    """
    source = np.random.RandomState(seed)
    plain = _plain_ops("series-parallel", num_ops, source)
    draws, num_made = _draws(source), 0

    def make(inputs: Iterable[int]) -> int:
        nonlocal num_made
        for producer in inputs:
            plain.read(num_made, producer)
        num_made += 1
        return num_made - 1

    def span(count: int, last: list[int]) -> int:
        if count > 3 and next(draws) % 2:
            sizes = _branch_sizes(count - 2, draws)
            fork = make(last)
            return make([span(size, [fork]) for size in reversed(sizes)])
        if count > 3:
            first = 1 + next(draws) % (count - 1)
            return span(count - first, [span(first, last)])
        for _ in range(count):
            last = [make(last)]
        return last[0]

    span(num_ops, [])
    return finished(plain, family="series-parallel", num_ops=num_ops, seed=seed)


def _branch_sizes(inner: int, draws: Iterator[int]) -> list[int]:
    """Return the numbers of ops of two to four parallel branches with ``inner`` ops in all."""
    num_branches = min(2 + next(draws) % 3, inner)
    left = inner - num_branches
    cuts = sorted(next(draws) % (left + 1) for _ in range(num_branches - 1))
    # Every branch has at least one op, so only the remaining ones are distributed.
    sizes: list[int] = np.diff([0, *cuts, left]).tolist()
    return [size + 1 for size in sizes]


def _draws(source: np.random.RandomState) -> Iterator[int]:
    """Yield random integers one at a time, generated in blocks of thousands."""
    while True:
        yield from reversed(source.randint(0, 2**31 - 1, 4096).tolist())


def _plain_ops(family: str, num_ops: int, source: np.random.RandomState) -> GraphBuilder:
    """Return ops that each make the tensor of their own number; half of them read a parameter."""
    builder = GraphBuilder(f"{family}-{num_ops}")
    output_bytes = _sizes(source, num_ops)
    # From an addition, one operation per four bytes, to a matrix product with 256 per byte.
    intensity = (1 << source.randint(0, 11, num_ops)) / 4
    for op, size in enumerate(output_bytes):
        builder.op(f"op{op}", flops=size * float(intensity[op]))
        builder.tensor(f"op{op}.out", size, producer=op)
    with_weight = np.flatnonzero(source.randint(0, 2, num_ops) == 1).tolist()
    for op, size in zip(with_weight, _sizes(source, len(with_weight)), strict=True):
        builder.read(op, builder.tensor(f"op{op}.weight", size, role=Role.PARAMETER))
    return builder


def _sizes(source: np.random.RandomState, count: int) -> list[int]:
    """Random bytes from 4 KiB to 15 MiB, spread over the powers of two as in real steps."""
    mantissa = source.randint(1, 16, count).astype(np.int64)
    sizes: list[int] = (mantissa << source.randint(12, 21, count).astype(np.int64)).tolist()
    return sizes


def finished(builder: GraphBuilder, **meta: str | int) -> Graph:
    """Build the graph; every op touches the bytes that it reads and makes."""
    for op, reads in zip(builder.ops, builder.op_reads, strict=True):
        op["bytes_touched"] = sum(builder.tensors[tensor]["bytes"] for tensor in reads)
    for tensor in builder.tensors:
        if tensor["producer"] >= 0:
            builder.ops[tensor["producer"]]["bytes_touched"] += tensor["bytes"]
    return builder.build(meta=meta)
