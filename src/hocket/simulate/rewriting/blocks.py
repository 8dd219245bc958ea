"""The blocks of a step: ranges of its forward ops, and the block of every other op.

A backward op belongs to the block of its forward op, an update to the first block that reads the
tensors it changes. O(ops + reads).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray
from hocket.base.errors import UsageError
from hocket.graph.graph import Graph, Phase
from hocket.plan.sections import Memory


@dataclass(frozen=True, eq=False)
class StepBlocks:
    """Blocks in the order of the forward pass, and the block of every op of the step."""

    names: tuple[str, ...]
    start: IntArray
    """Forward ops of block b are ``start[b]`` up to ``start[b + 1]``."""
    block_of: IntArray
    """Block of each op, of any phase."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.names)


def blocks_of(graph: Graph, memory: Memory) -> StepBlocks:
    """Return the blocks of a memory section; ops between two blocks belong to the first of them."""
    starts = [block.start for block in memory.blocks]
    # Ops before the first block belong to it.
    starts[:1] = [0]
    edges = np.array([*starts, num_forward_ops(graph)], dtype=np.int32)
    return make_blocks(graph, [block.name for block in memory.blocks], edges)


def num_forward_ops(graph: Graph) -> int:
    """Return the number of forward ops; raises `UsageError` unless they precede all other ops."""
    is_forward = graph.op_phase == Phase.FORWARD
    count = int(is_forward.sum())
    if not count:
        raise UsageError(f"{graph.name} has no forward pass", hint="capture a training step")
    if not is_forward[:count].all():
        raise UsageError(
            f"in {graph.name} ops of the forward pass stand behind those of the backward pass",
            hint="capture the model again: a recorded step has them in order",
        )
    return count


def make_blocks(graph: Graph, names: list[str], start: IntArray) -> StepBlocks:
    """Return blocks from the first forward op of each and the end of the last."""
    num_forward = int(start[-1])
    block_of = np.zeros(graph.num_ops, dtype=np.int32)
    block_of[:num_forward] = np.repeat(np.arange(len(names)), np.diff(start))
    backward = np.flatnonzero(graph.op_phase == Phase.BACKWARD)
    if len(backward):
        block_of[backward] = _backward_blocks(graph.partner[backward], block_of, len(names))
    for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).tolist():
        block_of[op] = _updated_block(graph, op, block_of, num_forward)
    return StepBlocks(tuple(names), start, block_of)


def _backward_blocks(partner: IntArray, block_of: IntArray, num_blocks: int) -> IntArray:
    """Return the block of each backward op.

    The backward pass runs from the last block to the first. If the blocks of the forward partners
    are not descending, the nearest descending sequence is used (isotonic regression).
    """
    wanted = np.where(partner >= 0, block_of[partner], -1)
    known = np.flatnonzero(wanted >= 0)
    if not len(known):
        # Without known partners the backward ops are spread evenly.
        return np.linspace(num_blocks - 1, 0, len(partner)).round().astype(np.int32)
    from scipy.optimize import isotonic_regression

    nearest = known[np.clip(np.searchsorted(known, np.arange(len(partner))), 0, len(known) - 1)]
    falling = isotonic_regression(wanted[nearest].astype(np.float64), increasing=False).x
    blocks: IntArray = np.round(falling).astype(np.int32)
    return blocks


def _updated_block(graph: Graph, op: int, block_of: IntArray, num_forward: int) -> int:
    """Return the first block whose forward pass reads a tensor that an update changes."""
    roots = {int(graph.root_of[tensor]) for tensor in graph.made_by(op)}
    roots &= {int(graph.root_of[tensor]) for tensor in graph.reads_of(op)}
    readers = [int(user) for root in roots for user in graph.users_of(root)[:1]]
    # Parameters that only the model's own code reads belong to the first block.
    first = min((user for user in readers if user < num_forward), default=0)
    return int(block_of[first])
