"""Random layers: layers of equal width, whose ops each read one to three ops of earlier layers.

Most inputs come from the layer directly before, some from up to three layers back, like skip
connections. O(ops).
"""

from __future__ import annotations

import math

import numpy as np

from hocket.graph.generators.batch import BatchBuilder
from hocket.graph.generators.plain import add_plain_ops, chance
from hocket.graph.graph import Graph

_MAX_WIDTH = 64
_MAX_INPUTS = 3
_BACK = np.array([1, 1, 1, 1, 1, 1, 2, 3])
"""Distances in layers that an input may span, drawn with equal probability."""


def layered(num_ops: int, seed: int) -> Graph:
    """A layered graph of exactly ``num_ops`` forward ops, as wide as deep up to 64 per layer."""
    source = chance(seed)
    builder = BatchBuilder(f"layered-{num_ops}")
    ops, outputs = add_plain_ops(builder, num_ops, source)
    width = min(_MAX_WIDTH, max(1, math.isqrt(num_ops)))
    later = np.arange(width, num_ops)
    num_inputs = source.randint(1, _MAX_INPUTS + 1, len(later))
    for index in range(_MAX_INPUTS):
        back = np.minimum(_BACK[source.randint(0, len(_BACK), len(later))], later // width)
        picked = (later // width - back) * width + source.randint(0, width, len(later))
        reading = num_inputs > index
        builder.reads(ops[later[reading]], outputs[picked[reading]])
    return builder.build({"family": "layered", "num_ops": num_ops, "seed": seed})
