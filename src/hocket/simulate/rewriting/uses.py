"""Producers and readers of a step's tensors, by module call and block: independent of the plan.

Covers activations that the backward pass reads, ops that recompute them, parameters with the blocks
that read them, and tensors that callers and autograd nodes hold. Recomputation of a module call
runs from its start to the last saved tensor. O(ops + reads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from hocket.base.arrays import BoolArray, LongArray, pointers, spans
from hocket.graph.graph import Graph, Phase, Role
from hocket.simulate.rewriting.blocks import StepBlocks
from hocket.simulate.rewriting.casts import CAST
from hocket.simulate.rewriting.module_calls import (
    OUTSIDE,
    ModuleCalls,
    find_module_calls,
    uncalled_lists,
)
from hocket.simulate.rewriting.nodes import (
    BackwardNodes,
    Happening,
    PassTurn,
    find_nodes,
    find_turns,
)
from hocket.simulate.rewriting.repeated_calls import Span, calls_of, outer_modules
from hocket.simulate.rewriting.updates import Update, find_updates

# Inputs of module calls: the calling code references them until the call returns.
#
# A container such as ``layer1`` of a residual net reads its input in its first block and is called
# for all of them, and Python's frames hold what they were called with. So the forward pass holds
# the inputs of modules and of those around them to the end of each call. O(ops · depth of modules).


def held_by_calls(
    graph: Graph, module_calls: ModuleCalls, num_forward: int, is_forward: BoolArray
) -> LongArray:
    """Return pairs of a call's last op and an input of the call, for tensors in ``is_forward``."""
    found = [np.zeros((0, 2), dtype=np.int64)]
    for start, stop in _calls(graph, module_calls, num_forward):
        at, _ = spans(graph.read_ptr, np.arange(start, stop))
        read = np.unique(graph.reads[at].astype(np.int64))
        given = read[is_forward[read] & (graph.tensor_producer[graph.root_of[read]] < start)]
        found.append(np.stack([np.full(len(given), stop - 1), given], axis=1))
    return np.concatenate(found)


def _calls(graph: Graph, module_calls: ModuleCalls, num_forward: int) -> list[Span]:
    """Return calls of the modules in ``module_calls`` and of modules that contain them."""
    modules = dict.fromkeys(
        module_call.module for module_call in module_calls.calls if module_call.module
    )
    uncalled = uncalled_lists(graph)
    around = dict.fromkeys(outer for path in modules for outer in outer_modules(path))
    return [(module_call.start, module_call.stop) for module_call in module_calls.calls] + [
        call
        for path in around
        if path not in uncalled
        for call in calls_of(graph, path, num_forward)
    ]


# The graph of a step as autograd holds its tensors, where that is longer than they are read.
#
# A capture notes which ops' nodes hold storages that no op of the backward pass reads. For a step
# of the model itself these ops read them. O(reads).

HELD = "held"
"""Key of a graph's metadata: names of tensors that an op's autograd node holds, by the op's
name."""


def as_held(graph: Graph) -> Graph:
    """Return the graph in which ops also read the tensors that their autograd nodes hold."""
    noted = graph.meta.get(HELD)
    if not noted:
        return graph
    op_of = {name: op for op, name in enumerate(graph.op_names)}
    tensor_of = {name: tensor for tensor, name in enumerate(graph.tensor_names)}
    reader = graph.reader
    # A graph that was derived from another has its note and may lack some of its ops.
    pairs = {
        (op_of[op], tensor_of[name])
        for op, names in noted.items()
        for name in names
        if op in op_of and name in tensor_of
    }
    every = sorted(pairs | {*zip(reader.tolist(), graph.reads.tolist(), strict=True)})
    ops, tensors = (np.array(column, dtype=np.int32) for column in zip(*every, strict=True))
    counts = np.bincount(ops, minlength=graph.num_ops)
    return replace(graph, read_ptr=pointers(counts), reads=tensors)


_RECURRENT = "aten._cudnn_rnn"
"""Op kind whose dropout draws from cuDNN's own random state, which PyTorch cannot restore."""


@dataclass(frozen=True, eq=False)
class Uses:
    """Producers and readers of the forward pass's storages; independent of the plan."""

    graph: Graph
    blocks: StepBlocks
    module_calls: ModuleCalls
    is_forward: BoolArray
    """Per tensor: True if the forward pass makes its storage."""
    backward_reads: tuple[tuple[int, ...], ...]
    """Per module call: tensors of forward storages that its backward ops read, in the order in
    which the forward pass saves them."""
    outside: tuple[frozenset[int], ...]
    """Per block: storages that its backward ops outside of module calls read."""
    recompute: tuple[tuple[int, ...], ...]
    """Per module call: forward ops that recompute the tensors its backward ops read; empty if there
    is nothing to recompute, or if these ops change tensors from outside of the call."""

    @cached_property
    def nodes(self) -> BackwardNodes:
        """The nodes of the backward pass."""
        return find_nodes(self.graph, self._given)

    @cached_property
    def _given(self) -> LongArray:
        num_forward = int(self.blocks.start[-1])
        return held_by_calls(self.graph, self.module_calls, num_forward, self.is_forward)

    @cached_property
    def backward(self) -> list[LongArray]:
        """Per block: its backward ops."""
        ops = np.flatnonzero(self.graph.op_phase == Phase.BACKWARD)
        block = self.blocks.block_of[ops]
        by_block = np.argsort(block, kind="stable")
        edges = np.searchsorted(block[by_block], np.arange(1, self.blocks.num_blocks))
        return np.split(ops[by_block], edges)

    @cached_property
    def turns(self) -> list[list[PassTurn]]:
        """Per block: events of module calls in its backward pass."""
        before, found = len(self.module_calls), list[list[PassTurn]]()
        for ops in reversed(self.backward):
            found.append(
                find_turns(ops, self.module_calls.call_of, self.nodes, self.reads_saved, before)
            )
            before = min((turn.module_call for turn in found[-1]), default=before)
        return found[::-1]

    @cached_property
    def last_calls(self) -> frozenset[int]:
        """Module calls that are the last of their blocks in the backward pass."""
        lowest: dict[int, int] = {}
        for turn in (turn for turns in reversed(self.turns) for turn in turns):
            if turn.what == Happening.ENTERED:
                lowest[self.module_calls.calls[turn.module_call].block] = turn.module_call
        return frozenset(lowest.values())

    @cached_property
    def reads_saved(self) -> BoolArray:
        """Per op: True if it reads a tensor made before the backward pass."""
        graph = self.graph
        reader = graph.reader
        found = np.zeros(graph.num_ops, dtype=np.bool_)
        found[reader[graph.tensor_producer[graph.reads] < self.blocks.start[-1]]] = True
        return found

    # ── parameters ───────────────────────────────────────────────────────────────────────────────

    @cached_property
    def parameter_reads(self) -> list[tuple[int, int]]:
        """Pairs of an op of either pass and the storage of a parameter that it reads."""
        graph = self.graph
        reader = graph.reader
        roots = graph.root_of[graph.reads]
        chosen = (graph.tensor_role[roots] == Role.PARAMETER) & (
            graph.op_phase[reader] != Phase.OPTIMIZER
        )
        return list(zip(reader[chosen].tolist(), roots[chosen].tolist(), strict=True))

    @cached_property
    def readers(self) -> dict[int, frozenset[int]]:
        """Parameters mapped to the blocks that read them, in either pass or in recomputation."""
        found: dict[int, set[int]] = defaultdict(set)
        for op, root in self.parameter_reads:
            found[root].add(int(self.blocks.block_of[op]))
        return {root: frozenset(of) for root, of in found.items()}

    @cached_property
    def shared(self) -> frozenset[int]:
        """Parameters that several blocks read, or code outside of all modules."""
        call_of, num_forward = self.module_calls.call_of.tolist(), int(self.blocks.start[-1])
        outside = {root for op, root in self.parameter_reads
                   if op < num_forward and call_of[op] == OUTSIDE}  # fmt: skip
        # Code outside of all modules has no hook that could fetch a parameter.
        return frozenset(outside | {root for root, of in self.readers.items() if len(of) > 1})

    def is_shared(self, update: Update) -> bool:
        """Return True if an update changes a parameter in `shared`."""
        return any(root in self.shared for root in update.roots)

    @cached_property
    def sharing(self) -> frozenset[int]:
        """Blocks whose module calls read parameters in `shared`."""
        call_of, shared = self.module_calls.call_of.tolist(), self.shared
        return frozenset(int(self.blocks.block_of[op]) for op, root in self.parameter_reads
                         if root in shared and call_of[op] != OUTSIDE)  # fmt: skip

    @cached_property
    def updates(self) -> dict[int, Update]:
        """The updates of the step."""
        return find_updates(self.graph, self.blocks, self.readers, self.copied_bytes)

    @cached_property
    def first_block(self) -> LongArray:
        """Per op: its block; for an update, the first block that reads its parameters."""
        block = self.blocks.block_of.astype(np.int64)
        for update in self.updates.values():
            block[update.op] = min(update.readers)
        return block

    @cached_property
    def copied_bytes(self) -> LongArray:
        """Per tensor: bytes of its copy from the host.

        A parameter that all readers only round to one smaller dtype is copied in that dtype.
        """
        graph = self.graph
        copied = graph.tensor_bytes.astype(np.int64)
        sizes: dict[int, set[int]] = {}
        for op, root in self.parameter_reads:
            made = int(graph.tensor_bytes[root])
            if graph.kind_of(op) == CAST:
                made = sum(int(graph.tensor_bytes[tensor]) for tensor in graph.made_by(op))
            sizes.setdefault(root, set()).add(made)
        for root, made_bytes in sizes.items():
            # Different sizes mean that some reader needs full precision.
            if len(made_bytes) == 1:
                copied[root] = min(copied[root], made_bytes.pop())
        return copied

    # ── activations ──────────────────────────────────────────────────────────────────────────────

    @cached_property
    def block_calls(self) -> tuple[range, ...]:
        """Per block: its module calls."""
        of = np.array(
            [module_call.block for module_call in self.module_calls.calls], dtype=np.int64
        )
        edges = np.searchsorted(of, np.arange(self.blocks.num_blocks + 1)).tolist()
        return tuple(range(a, b) for a, b in pairwise(edges))

    def makes(self, module_call: int, storages: Collection[int]) -> list[int]:
        """Return those of some storages that a module call makes."""
        roots = np.array(list(storages), dtype=np.int64)
        is_own = self.module_calls.call_of[self.graph.tensor_producer[roots]] == module_call
        own: list[int] = roots[is_own].tolist()
        return own

    @cached_property
    def _saved(self) -> list[list[int]]:
        root_of = self.graph.root_of
        return [list(dict.fromkeys(root_of[list(reads)].tolist())) for reads in self.backward_reads]

    def saved(self, module_call: int) -> list[int]:
        """Return the storages that a module call's backward pass reads, in the order of saving."""
        return self._saved[module_call]

    @cached_property
    def needed(self) -> tuple[list[int], ...]:
        """Per block: storages that its backward pass reads."""
        return tuple(
            sorted(set(outside).union(*map(self.saved, module_calls)))
            for outside, module_calls in zip(self.outside, self.block_calls, strict=True)
        )

    @cached_property
    def taken(self) -> tuple[list[int], ...]:
        """Per module call: storages made outside of it that its recomputation reads."""
        graph = self.graph
        found = []
        for module_call, recompute in enumerate(self.recompute):
            at, _ = spans(graph.read_ptr, np.array(recompute, dtype=np.int64))
            saved = np.array(self.saved(module_call), dtype=np.int64)
            roots = np.unique(np.append(graph.root_of[graph.reads[at]], saved))
            roots = roots[self.is_forward[roots]]
            is_own = self.module_calls.call_of[graph.tensor_producer[roots]] == module_call
            found.append(roots[~is_own].tolist())
        return tuple(found)


def find_uses(graph: Graph, blocks: StepBlocks) -> Uses:
    """Return the readers of the forward pass's storages, by module call and block."""
    graph = as_held(graph)
    num_forward = int(blocks.start[-1])
    owner = graph.tensor_producer[graph.root_of]
    is_forward = (owner >= 0) & (owner < num_forward) & (graph.tensor_bytes[graph.root_of] > 0)
    module_calls = find_module_calls(graph, blocks.start, blocks.block_of)
    reads: list[set[tuple[int, int]]] = [set() for _ in module_calls.calls]
    outside: list[set[int]] = [set() for _ in blocks.names]
    reader = graph.reader
    chosen = (graph.op_phase[reader] == Phase.BACKWARD) & is_forward[graph.reads]
    ops, tensors = reader[chosen], graph.reads[chosen]
    for module_call, block, partner, tensor, root in zip(
        module_calls.call_of[ops].tolist(), blocks.block_of[ops].tolist(),
        graph.partner[ops].tolist(), tensors.tolist(), graph.root_of[tensors].tolist(), strict=True,
    ):  # fmt: skip
        if module_call == OUTSIDE:
            outside[block].add(root)
        else:
            reads[module_call].add((partner, tensor))
    # Sorted by forward op, which is the order of saving.
    ordered = tuple(tuple(dict.fromkeys(t for _, t in sorted(each))) for each in reads)
    recompute = [
        _from_start(graph, module_call.start, module_call.stop, tensors)
        for module_call, tensors in zip(module_calls.calls, ordered, strict=True)
    ]
    return Uses(
        graph,
        blocks,
        module_calls,
        is_forward,
        ordered,
        tuple(map(frozenset, outside)),
        tuple(recompute),
    )


def _from_start(graph: Graph, start: int, stop: int, tensors: Iterable[int]) -> tuple[int, ...]:
    """Return the ops of a module call up to the last one that makes one of the tensors.

    Recomputation repeats the call and stops once all of the tensors are made. Empty if the call
    cannot run twice.
    """
    makers = [int(graph.tensor_producer[tensor]) for tensor in tensors]
    last = max((op for op in makers if start <= op < stop), default=start - 1)
    return tuple(range(start, last + 1)) if can_run_twice(graph, start, stop) else ()


def can_run_twice(graph: Graph, start: int, stop: int) -> bool:
    """Return True if a module call leaves its inputs unchanged and repeats with equal results."""
    return not any(
        _changes_foreign(graph, op, start) or _draws_by_itself(graph, op)
        for op in range(start, stop)
    )


def _draws_by_itself(graph: Graph, op: int) -> bool:
    """Return True if an op draws random numbers whose state PyTorch cannot restore."""
    return bool(graph.rng_order[op] >= 0) and graph.kind_of(op) == _RECURRENT


def _changes_foreign(graph: Graph, op: int, start: int) -> bool:
    """Return True if an op writes in place into an activation that was made before ``start``."""
    if not _is_in_place(graph, op):
        return False
    owners = graph.tensor_producer[graph.root_of[list(graph.made_by(op))]]
    return bool(np.any((owners >= 0) & (owners < start)))


def _is_in_place(graph: Graph, op: int) -> bool:
    return graph.kind_of(op).partition(".")[2].partition(".")[0].endswith("_")
