"""The loss in chunks: ops that run chunk by chunk, so that all logits never exist at the same time.

The last linear layer makes the logits, the loss is their cross-entropy, and the backward pass turns
them into the gradient of the layer's input. Each chunk of the batch runs forward through the layer
and the loss, and once more together with its backward pass. Results that ops outside read (the
loss, gradients of parameters and of the layer's input) are kept in full and chunks add to them.
Tensors computed from parameters alone are made once; all other tensors exist for one chunk at a
time. O(ops).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hocket.base.arrays import IntArray, spans
from hocket.graph.graph import Graph, Phase, Role
from hocket.simulate.rewriting.blocks import StepBlocks

_LOSS = "aten.nll_loss_forward"
_LINEAR = frozenset({"aten.mm", "aten.addmm", "aten.linear"})
_BETWEEN = frozenset(
    f"aten.{name}"
    for name in ("_log_softmax", "view", "_unsafe_view", "clone", "_to_copy", "slice", "alias")
)
"""Ops between the logits and the loss."""
_SCORES = 3
"""Number of tensors with the size of all logits that exist at the same time without chunks."""


@dataclass(frozen=True, eq=False)
class Region:
    """The ops that run in chunks: those of the last block from the last linear layer on."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    once: frozenset[int]
    """Ops that do not depend on the batch, and run with the first chunk only."""
    whole: frozenset[int]
    """Storages that ops outside of the region read, by their owning tensors."""
    rows: IntArray
    """Inputs of the region from earlier in the forward pass, which are held until the last chunk
    ends."""

    @cached_property
    def ops(self) -> frozenset[int]:
        """All ops of the region."""
        return frozenset((*self.forward, *self.backward))


def find_region(graph: Graph, blocks: StepBlocks) -> Region:
    """Return the ops of the last block that run in chunks, and the storages kept in full."""
    last = blocks.num_blocks - 1
    first = _first_op(graph, *blocks.start[-2:].tolist())
    forward = range(first, int(blocks.start[-1]))
    is_backward = (graph.op_phase == Phase.BACKWARD) & (blocks.block_of == last)
    is_backward &= (graph.partner < 0) | (graph.partner >= first)
    backward = np.flatnonzero(is_backward).tolist()
    inside = is_backward.copy()
    inside[forward] = True
    fixed: set[int] = set()
    once: set[int] = set()
    for op in (*forward, *backward):
        reads = graph.reads_of(op).tolist()
        made_before = graph.tensor_producer[reads] >= 0
        from_batch = [
            tensor
            for tensor, is_made in zip(reads, made_before.tolist(), strict=True)
            if tensor not in fixed and (is_made or _is_batch(graph, tensor))
        ]
        # Ops that depend only on parameters run once, with the first chunk.
        if reads and not from_batch:
            once.add(op)
            fixed.update(graph.made_by(op))
    whole: set[int] = set()
    for op in {*forward, *backward} - once:
        for tensor in graph.made_by(op):
            users = graph.users_of(tensor)
            if graph.is_held[tensor] or not inside[users].all():
                whole.add(int(graph.root_of[tensor]))
    at, _ = spans(graph.read_ptr, np.array(forward, dtype=np.int64))
    producer = graph.tensor_producer[graph.reads[at]]
    rows = graph.reads[at][(producer >= 0) & (producer < first)]
    return Region(tuple(forward), tuple(backward), frozenset(once), frozenset(whole), rows)


def _first_op(graph: Graph, first: int, last: int) -> int:
    """Return the first op that runs in chunks.

    It is the first op of the module that makes logits, which also rounds its input and weights.
    """
    logits = find_logits(graph, first, last)
    if logits is None:
        return first
    while logits > first and graph.module_of(logits) == graph.module_of(logits - 1) != "":
        # Ops of the module before the product, such as casts of its input, belong to the region.
        logits -= 1
    return logits


def logits_module(graph: Graph, first: int, last: int) -> str:
    """Return the module of the op among ``first`` up to ``last`` that makes logits; empty if
    unknown."""
    op = find_logits(graph, first, last)
    return "" if op is None else graph.module_of(op)


def has_logits(graph: Graph, blocks: StepBlocks) -> bool:
    """Return True if the loss can be computed in chunks.

    That needs a linear layer in the last block whose output is the input of the cross-entropy.
    Graphs that were not captured are always accepted, since nothing executes them.
    """
    if not graph.is_recorded:
        return True
    first, last = blocks.start[-2:].tolist()
    return find_logits(graph, first, last) is not None


def has_large_logits(graph: Graph, blocks: StepBlocks) -> bool:
    """Return True if computing the loss in chunks is possible and saves memory.

    It does if logits, their logarithms and gradients take more memory than the gradient of the
    weight, which chunks need in addition because they add to it.
    """
    if not graph.is_recorded:
        return True
    logits = find_logits(graph, *blocks.start[-2:].tolist())
    if logits is None:
        return False
    made, read = (graph.tensor_bytes[[*each]] for each in
                  (graph.made_by(logits), graph.reads_of(logits)))  # fmt: skip
    # Compared with the weight, the largest input of the product.
    return bool(_SCORES * made.max() > read.max())


def find_logits(graph: Graph, first: int, last: int) -> int | None:
    """Return the op in the range that makes the logits of a cross-entropy, or None."""
    losses = [op for op in range(first, last) if graph.kind_of(op) == _LOSS]
    pending = [int(tensor) for op in losses for tensor in graph.reads_of(op)]
    while pending:
        op = int(graph.tensor_producer[pending.pop()])
        if op < first:
            continue
        if graph.kind_of(op) in _LINEAR:
            return op
        if graph.kind_of(op) in _BETWEEN:
            pending += graph.reads_of(op).tolist()
    return None


def _is_batch(graph: Graph, tensor: int) -> bool:
    return bool(graph.tensor_role[tensor] == Role.INPUT)
