"""Bytes that each pass of each block works in: all that is live, without what other blocks saved.

A walk over the step in its order. A storage that the backward pass needs counts while its block and
the block that it is for run forward, and again while blocks that need it run backward; in between
it is what a block leaves behind, which the plan decides about. O(ops + reads), Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.graph.graph import Phase
from hocket.simulate.rewriting.chunks import find_region
from hocket.simulate.rewriting.experts import parts_of
from hocket.simulate.rewriting.uses import Uses


@dataclass(frozen=True, eq=False)
class Work:
    """Most bytes per pass, and the bytes at each op before the updates."""

    forward: FloatArray
    backward: FloatArray
    held: FloatArray
    inner: FloatArray
    """Of these, what exists for one chunk at a time where the last block goes in chunks."""
    tail: IntArray
    """Ops of the last block."""
    chunked: tuple[int, ...]
    """Forward ops that run twice where the loss goes in chunks."""


def needed_last(uses: Uses, groups: Mapping[int, int]) -> dict[int, int]:
    """Per saved storage: of the blocks whose backward pass reads it, the first to come then. What
    is made of one of the groups of experts is not saved."""
    last: dict[int, int] = {}
    for block in range(uses.blocks.num_blocks):
        for storage in uses.needed[block]:
            last[storage] = block
    for root in groups:
        for storage in uses.experts[root].made:
            last.pop(storage, None)
    return last


def find_work(uses: Uses, groups: Mapping[int, int]) -> Work:
    """The bytes of each pass, where so many parameters of experts go in so many groups."""
    graph, blocks = uses.graph, uses.blocks
    num_forward = int(blocks.start[-1])
    num_step = int((graph.op_phase != Phase.OPTIMIZER).sum())
    region, last_block = find_region(graph, blocks), blocks.num_blocks - 1
    saved = needed_last(uses, groups)
    passing = {storage for root in groups for storage in uses.experts[root].made}
    stops = _last_reads(uses, num_step)
    block_of = blocks.block_of[:num_step]
    held, inner = np.zeros(num_step + 1), np.zeros(num_step + 1)
    backward_ends = _backward_ends(uses, num_step)
    producer, sizes = (
        graph.tensor_producer,
        graph.held_bytes / parts_of(graph, uses.experts, groups),
    )
    for storage in np.flatnonzero((producer >= 0) & (producer < num_step) & (sizes > 0)).tolist():
        start, size = int(producer[storage]), float(sizes[storage])
        spans = [(start, start + 1 if storage in passing else int(stops[storage]) + 1)]
        if storage in saved:
            until = max(saved[storage], int(block_of[start]))
            spans = [(start, int(blocks.start[until + 1])), *backward_ends[storage]]
        is_inner = start in region.ops and storage not in region.whole
        for begin, end in spans:
            held[begin] += size
            held[end] -= size
            if is_inner:
                inner[begin] += size
                inner[end] -= size
    at = np.cumsum(held)[:num_step] + graph.workspace_bytes[:num_step]
    count = blocks.num_blocks
    forward, backward = np.zeros(count), np.zeros(count)
    np.maximum.at(forward, block_of[:num_forward], at[:num_forward])
    np.maximum.at(backward, block_of[num_forward:], at[num_forward:])
    tail = np.flatnonzero(block_of == last_block).astype(np.int32)
    inner_at = np.cumsum(inner)[:num_step] + graph.workspace_bytes[:num_step]
    return Work(forward, backward, at, inner_at, tail, region.forward)


def _last_reads(uses: Uses, num_step: int) -> LongArray:
    """Per storage: the op of the step after which it is free; a gradient goes with its update,
    which follows the backward pass of the block."""
    graph, block_of = uses.graph, uses.blocks.block_of
    reader = graph.reader
    ends = np.zeros(uses.blocks.num_blocks, dtype=np.int64)
    np.maximum.at(ends, block_of[:num_step], np.arange(num_step))
    until = np.where(reader < num_step, reader, ends[block_of[reader]])
    last = np.maximum(graph.tensor_producer.astype(np.int64), -1)
    np.maximum.at(last, graph.root_of[graph.reads], until)
    keeps = graph.is_held & ~np.isin(np.arange(graph.num_tensors), graph.reads)
    last[graph.root_of[keeps]] = num_step - 1
    return np.minimum(last, num_step - 1)


def _backward_ends(uses: Uses, num_step: int) -> dict[int, list[tuple[int, int]]]:
    """Per saved storage and block that needs it: from the begin of the block's backward pass to the
    storage's last reader there."""
    graph, blocks = uses.graph, uses.blocks
    ops = np.arange(int(blocks.start[-1]), num_step)
    begins = np.full(blocks.num_blocks, num_step)
    np.minimum.at(begins, blocks.block_of[ops], ops)
    ends: dict[tuple[int, int], int] = {}
    for op in ops.tolist():
        block = int(blocks.block_of[op])
        for tensor in graph.reads_of(op).tolist():
            if uses.is_forward[tensor]:
                ends[int(graph.root_of[tensor]), block] = op + 1
    spans: dict[int, list[tuple[int, int]]] = {}
    for (storage, block), end in ends.items():
        spans.setdefault(storage, []).append((int(begins[block]), end))
    return spans
