"""Which storages the backward pass of each block needs, and how: kept, fetched or made again.

A storage that the forward pass makes is needed by a block whose backward ops read it, or, where the
block is recomputed, whose forward ops read it again. It stays on the device as soon as one of the
blocks that need it keeps it; it goes to the host where all of them are content to fetch it; what
only recomputed blocks need and make themselves is dropped. O(ops + reads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hocket.base.arrays import BoolArray, LongArray, spans
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.sections import Memory, MemoryBlock
from hocket.simulate.rewriting.blocks import StepBlocks
from hocket.simulate.rewriting.experts import BatchedExperts, find_experts, in_groups
from hocket.simulate.rewriting.updates import Update, find_updates

_CAST = "aten._to_copy"
SMALLEST_MOVED = 64 * 1024
"""Storages of fewer bytes stay: a copy of theirs would be all latency."""


@dataclass(frozen=True, eq=False)
class Needs:
    """What becomes of the storages of the forward pass, by the tensors that own them."""

    again: tuple[tuple[int, ...], ...]
    """Per block: forward ops that its backward pass runs again, in order."""
    offloaded: dict[int, tuple[int, int]]
    """Storage to the block that makes it and the last block that needs it, which is the first to
    come in the backward pass."""


@dataclass(frozen=True, eq=False)
class Uses:
    """What does not depend on the plan: who makes and reads the storages of the forward pass."""

    graph: Graph
    blocks: StepBlocks
    is_forward: BoolArray
    """Per tensor: whether its storage is made by the forward pass."""
    backward_reads: tuple[frozenset[int], ...]
    """Per block: tensors of forward storages that its backward ops read."""
    again: tuple[tuple[int, ...], ...]
    """Per block: forward ops that make again what its backward ops read; empty where they change
    something that is not theirs."""

    @cached_property
    def experts(self) -> dict[int, BatchedExperts]:
        """Parameters that hold the matrices of experts."""
        return find_experts(self.graph, self.blocks)

    @cached_property
    def parameter_reads(self) -> list[tuple[int, int]]:
        """Ops of both passes and the storages of parameters that they read."""
        graph = self.graph
        reader = np.repeat(np.arange(graph.num_ops), np.diff(graph.read_ptr))
        roots = graph.root_of[graph.reads]
        chosen = (graph.tensor_role[roots] == Role.PARAMETER) & (
            graph.op_phase[reader] != Phase.OPTIMIZER
        )
        return list(zip(reader[chosen].tolist(), roots[chosen].tolist(), strict=True))

    @cached_property
    def readers(self) -> dict[int, frozenset[int]]:
        """Parameters to the blocks that compute with them: what runs again is of the same block."""
        found: dict[int, set[int]] = defaultdict(set)
        for op, root in self.parameter_reads:
            found[root].add(int(self.blocks.block_of[op]))
        return {root: frozenset(of) for root, of in found.items()}

    @cached_property
    def updates(self) -> dict[int, Update]:
        """The updates of the step."""
        return find_updates(self.graph, self.blocks, self.readers, self.copied_bytes)

    @cached_property
    def first_block(self) -> LongArray:
        """Per op its block; of an update, the first block that reads its parameters."""
        block = self.blocks.block_of.astype(np.int64)
        for update in self.updates.values():
            block[update.op] = min(update.readers)
        return block

    @cached_property
    def copied_bytes(self) -> LongArray:
        """Per tensor: the bytes that bring it from the host, fewer where all that a parameter is
        read for is to be rounded to one and the same smaller type."""
        graph = self.graph
        copied = graph.tensor_bytes.astype(np.int64)
        sizes: dict[int, set[int]] = {}
        for op, root in self.parameter_reads:
            made = int(graph.tensor_bytes[root])
            if graph.kind_of(op) == _CAST:
                made = sum(int(graph.tensor_bytes[tensor]) for tensor in graph.made_by(op))
            sizes.setdefault(root, set()).add(made)
        for root, made_bytes in sizes.items():
            if len(made_bytes) == 1:
                copied[root] = min(copied[root], made_bytes.pop())
        return copied

    def producer_block(self, storage: int) -> int:
        """The block that makes a storage."""
        return int(self.blocks.block_of[self.graph.tensor_producer[storage]])

    @cached_property
    def _saved(self) -> list[list[int]]:
        root_of = self.graph.root_of
        return [np.unique(root_of[list(reads)]).tolist() for reads in self.backward_reads]

    def saved(self, block: int) -> list[int]:
        """Storages that the backward pass of a block reads, in the order in which they are made."""
        return self._saved[block]

    @cached_property
    def _checkpoints(self) -> dict[tuple[int, tuple[int, ...]], list[int]]:
        return {}

    def checkpoint(self, block: int, again: tuple[int, ...]) -> list[int]:
        """Storages of earlier blocks that the block needs where it runs these ops again."""
        known = self._checkpoints
        if (block, again) not in known:
            graph = self.graph
            at, _ = spans(graph.read_ptr, np.array(again, dtype=np.int64))
            roots = np.unique(np.append(graph.root_of[graph.reads[at]], self.saved(block)))
            roots = roots[self.is_forward[roots]]
            is_own = self.blocks.block_of[graph.tensor_producer[roots]] == block
            known[block, again] = roots[~is_own].tolist()
        return known[block, again]

    def again_for(self, block: int, storages: Collection[int]) -> tuple[int, ...]:
        """Forward ops that make only these storages of a block again, the others being kept."""
        kept = set(self.saved(block)) - set(storages)
        root = self.graph.root_of
        wanted = [t for t in self.backward_reads[block] if int(root[t]) in storages]
        return _ops_again(self.graph, self.blocks, wanted, block, kept)


def find_uses(graph: Graph, blocks: StepBlocks) -> Uses:
    """Readers of the forward pass's storages by block."""
    num_forward = int(blocks.start[-1])
    owner = graph.tensor_producer[graph.root_of]
    is_forward = (owner >= 0) & (owner < num_forward) & (graph.tensor_bytes[graph.root_of] > 0)
    reads: list[set[int]] = [set() for _ in blocks.names]
    for op in np.flatnonzero(graph.op_phase == Phase.BACKWARD).tolist():
        here = graph.reads_of(op)
        reads[blocks.block_of[op]].update(here[is_forward[here]].tolist())
    again = [_ops_again(graph, blocks, reads[block], block) for block in range(blocks.num_blocks)]
    return Uses(graph, blocks, is_forward, tuple(map(frozenset, reads)), tuple(again))


def _ops_again(
    graph: Graph,
    blocks: StepBlocks,
    tensors: Iterable[int],
    block: int,
    kept: Collection[int] = (),
) -> tuple[int, ...]:
    """The block's forward ops that lead to the tensors from those of storages that are there, or
    none where that cannot be done twice."""
    start, stop = int(blocks.start[block]), int(blocks.start[block + 1])
    pending = [int(graph.tensor_producer[tensor]) for tensor in tensors]
    found: set[int] = set()
    while pending:
        op = pending.pop()
        if not start <= op < stop or op in found:
            continue
        found.add(op)
        pending += [
            int(graph.tensor_producer[tensor])
            for tensor in graph.reads_of(op).tolist()
            if int(graph.root_of[tensor]) not in kept
        ]
    if any(_changes_foreign(graph, op, start) for op in found):
        return ()
    return tuple(sorted(found))


def _changes_foreign(graph: Graph, op: int, start: int) -> bool:
    """Whether an op writes in place into an activation that an earlier block made."""
    if not graph.kind_of(op).partition(".")[2].partition(".")[0].endswith("_"):
        return False
    owners = graph.tensor_producer[graph.root_of[list(graph.made_by(op))]]
    return bool(np.any((owners >= 0) & (owners < start)))


def find_needs(uses: Uses, memory: Memory) -> Needs:
    """What becomes of each storage under a plan."""
    stays: set[int] = set()
    wanted: dict[int, list[int]] = defaultdict(list)
    again: list[tuple[int, ...]] = []
    last = len(memory.blocks) - 1
    # What is made of one group of experts is made again for the backward pass of the group.
    passing = {s for root in in_groups(uses.experts, memory) for s in uses.experts[root].made}
    for number, block in enumerate(memory.blocks):
        if number == last and memory.loss_chunks > 1:
            # In chunks nothing of it is left behind.
            block = replace(block, activations="kept")
        ops = _run_again(uses, number, block)
        again.append(ops)
        if ops:
            needed = list(uses.checkpoint(number, ops))
            goes = set(needed) if block.checkpoint == "offloaded" else set[int]()
            if block.tensors:
                named = _named(uses, block, number)
                needed += [s for s in uses.saved(number) if s not in named]
        else:
            needed = uses.saved(number)
            goes = _offloaded(uses.graph, block, needed)
        for storage in needed:
            if storage in passing:
                continue
            if storage in goes and uses.graph.tensor_bytes[storage] >= SMALLEST_MOVED:
                wanted[storage].append(number)
            else:
                stays.add(storage)
    offloaded = {
        storage: (uses.producer_block(storage), max(numbers))
        for storage, numbers in wanted.items()
        if storage not in stays
    }
    return Needs(tuple(again), offloaded)


def _run_again(uses: Uses, number: int, block: MemoryBlock) -> tuple[int, ...]:
    if block.activations != "recomputed":
        return ()
    if block.tensors:
        return uses.again_for(number, _named(uses, block, number))
    return uses.again[number]


def _named(uses: Uses, block: MemoryBlock, number: int) -> set[int]:
    """Those of the block's own storages that it names."""
    names = set(block.tensors)
    return {
        storage
        for storage in uses.saved(number)
        if uses.graph.tensor_names[storage] in names and uses.producer_block(storage) == number
    }


def _offloaded(graph: Graph, block: MemoryBlock, storages: list[int]) -> set[int]:
    """Those of a block's storages that its policy sends to the host."""
    if block.activations != "offloaded":
        return set()
    if block.tensors:
        named = set(block.tensors)
        storages = [storage for storage in storages if graph.tensor_names[storage] in named]
    sizes = graph.tensor_bytes[storages]
    room = block.share * float(sizes.sum())
    return {s for s, end in zip(storages, np.cumsum(sizes).tolist(), strict=True) if end <= room}
