"""A chain: each op reads the output of the one before. O(ops)."""

from __future__ import annotations

from hocket.graph.generators.batch import BatchBuilder
from hocket.graph.generators.plain import add_plain_ops, chance
from hocket.graph.graph import Graph


def chain(num_ops: int, seed: int) -> Graph:
    """A chain of exactly ``num_ops`` forward ops."""
    builder = BatchBuilder(f"chain-{num_ops}")
    ops, outputs = add_plain_ops(builder, num_ops, chance(seed))
    builder.reads(ops[1:], outputs[:-1])
    return builder.build({"family": "chain", "num_ops": num_ops, "seed": seed})
