"""The loss in chunks: which ops are done piece by piece so that all logits never exist together.

The last linear layer makes the logits, whose cross-entropy is the loss, and the backward pass turns
them into the gradient of its input at once. Each part of the batch goes through the layer and the
loss, and once more for its backward pass. What leaves these ops (the loss, gradients of parameters
and of the layer's input) exists whole and is added to; what is made of parameters alone is made
once; all else exists for one chunk at a time. O(ops).
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
"""Tensors of the size of all logits that exist together where they are not in chunks."""


@dataclass(frozen=True, eq=False)
class Region:
    """The ops that go through in chunks: of the last block, from the last linear layer on."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    once: frozenset[int]
    """Ops that do not depend on the batch."""
    whole: frozenset[int]
    """Storages that leave the region, by the tensors that own them."""
    rows: IntArray
    """Inputs of the region from earlier in the forward pass; they are held until the last chunk is
    over."""

    @cached_property
    def ops(self) -> frozenset[int]:
        """All of them."""
        return frozenset((*self.forward, *self.backward))


def find_region(graph: Graph, blocks: StepBlocks) -> Region:
    """Ops of the last block that run in chunks, with tensors made whole and ops run once."""
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
    """Of the last block the op that chunks begin with: the layer that makes logits rounds its input
    and its weights itself."""
    logits = find_logits(graph, first, last)
    if logits is None:
        return first
    while logits > first and graph.module_of(logits) == graph.module_of(logits - 1) != "":
        logits -= 1
    return logits


def logits_module(graph: Graph, first: int, last: int) -> str:
    """The path of the module whose op among ``first`` up to ``last`` makes logits; empty where none
    is known to."""
    op = find_logits(graph, first, last)
    return "" if op is None else graph.module_of(op)


def has_logits(graph: Graph, blocks: StepBlocks) -> bool:
    """True if the loss can be made in chunks: in the last block a linear layer makes logits, whose
    cross-entropy is the loss. Of graphs that were not recorded from a model nothing is known, and
    nothing executes them."""
    if not graph.is_recorded:
        return True
    first, last = blocks.start[-2:].tolist()
    return find_logits(graph, first, last) is not None


def has_large_logits(graph: Graph, blocks: StepBlocks) -> bool:
    """True if the loss can be made in chunks, and holds less so: scores, their logarithms and
    gradients are more than the second gradient of the weight, to which those of chunks are
    added."""
    if not graph.is_recorded:
        return True
    logits = find_logits(graph, *blocks.start[-2:].tolist())
    if logits is None:
        return False
    made, read = (graph.tensor_bytes[[*each]] for each in
                  (graph.made_by(logits), graph.reads_of(logits)))  # fmt: skip
    return bool(_SCORES * made.max() > read.max())


def find_logits(graph: Graph, first: int, last: int) -> int | None:
    """The op among ``first`` up to ``last`` that makes logits whose cross-entropy is there, too."""
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
