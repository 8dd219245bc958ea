"""Which parts of a person's model run again for their backward pass, as a plan says it.

A plan names blocks of ops of its own graph, or all layers. A recorded step has them by the names of
its ops (`placed_like`); where modules are run instead of a recorded step, a module runs again when
all that it does is in such blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from hocket.base.arrays import IntArray
from hocket.capture.program import Program
from hocket.graph.graph import Graph, Phase
from hocket.runtime.train.divided.stack import find_stack, layer_of
from hocket.runtime.train.traced_recompute import BlockOf
from hocket.runtime.train.traced_step import placed_like
from hocket.simulate.parallel.recompute_and_host import second_run


def blocks_like(planned: Graph, blocks: Sequence[tuple[int, int]]) -> BlockOf:
    """The blocks of a planned graph in steps of the same model on batches of any size."""
    block_of = second_run(planned, tuple(blocks)).block_of

    def found(graph: Graph, program: Program) -> IntArray:
        return placed_like(graph, planned, block_of)

    return found


def all_layers(model: nn.Module) -> BlockOf:
    """Every layer of the model's stack."""
    stack, _ = find_stack(model)

    def found(graph: Graph, program: Program) -> IntArray:
        layers = [layer_of(call.module, stack) for call in program.calls]
        return np.array([-1 if layer is None else layer for layer in layers], dtype=np.int32)

    return found


def covered_modules(planned: Graph, blocks: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Paths of the outermost modules all of whose ops are in the blocks."""
    again = second_run(planned, tuple(blocks)).block_of >= 0
    is_covered: dict[str, bool] = {}
    for op in np.flatnonzero(planned.op_phase == Phase.FORWARD).tolist():
        path = planned.module_of(op)
        while path:
            is_covered[path] = is_covered.get(path, True) and bool(again[op])
            path = path.rpartition(".")[0]
    return tuple(
        path for path, covered in is_covered.items()
        if covered and not is_covered.get(path.rpartition(".")[0], False)
    )  # fmt: skip
