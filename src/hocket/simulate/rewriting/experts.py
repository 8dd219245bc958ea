"""Parameters of experts: batches of matrices that are only ever multiplied matrix by matrix.

A mixture of experts often has the matrices of all its experts in one parameter, and multiplies them
as a batch. Such a product can be done for a group of experts at a time, so that neither the
parameter nor its gradient need ever be whole on the device. Found by the ops: whatever reads the
parameter are views and casts that lead to batched products, and one such product makes its
gradient. O(ops + reads).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from hocket.base.arrays import LongArray
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role
from hocket.graph.signatures import tensor_shapes
from hocket.plan.sections import Memory
from hocket.simulate.rewriting.blocks import StepBlocks

_PRODUCT, _SORTED, _COPY = "aten.bmm", "aten._grouped_mm", "aten.copy_"
_TURNS = frozenset(
    f"aten.{name}"
    for name in ("_to_copy", "transpose", "permute", "expand", "view", "_unsafe_view", "unsqueeze",
                 "squeeze", "clone")
)  # fmt: skip
"""Ops on a parameter, or on its gradient, that do not mix experts."""


@dataclass(frozen=True, eq=False)
class BatchedExperts:
    """One parameter that holds the matrices of experts."""

    root: int
    """The parameter."""
    count: int
    """Experts in it."""
    block: int
    """The only block that reads it."""
    turned: dict[int, tuple[int, ...]]
    """Products that read it, and the ops that turn and cast it for each of them."""
    maker: int
    """The product that makes its gradient; -1 where it has none."""
    gradient: tuple[int, ...]
    """Ops that turn and cast what the maker made into the gradient."""
    unused: frozenset[int]
    """Ops that transform the parameter or its gradient without any reader."""
    made: frozenset[int]
    """Storages of the parameter turned and cast, and of its gradient."""

    def num_groups(self, wanted: int) -> int:
        """Number of groups of equal size, but for the last, where so many are requested."""
        return -(-self.count // -(-self.count // wanted))

    @property
    def aside(self) -> set[int]:
        """Ops that are done with a product, group by group, and not by themselves."""
        return {op for ops in self.turned.values() for op in ops} | {*self.gradient, *self.unused}


def find_experts(graph: Graph, blocks: StepBlocks) -> dict[int, BatchedExperts]:
    """All such parameters, by their numbers."""
    readers: dict[int, list[int]] = {}
    reader = graph.reader
    is_parameter = graph.tensor_role[graph.root_of[graph.reads]] == Role.PARAMETER
    for op, tensor in zip(reader[is_parameter].tolist(), graph.reads[is_parameter].tolist(),
                          strict=True):  # fmt: skip
        readers.setdefault(int(graph.root_of[tensor]), []).append(op)
    made = (_experts(graph, blocks, root, ops) for root, ops in readers.items())
    found = [each for each in made if each is not None]
    # A product of two such parameters, or of one and for the gradient of another, is none of these.
    uses = Counter(op for each in found for op in (*each.turned, each.maker) if op >= 0)
    return {each.root: each for each in found
            if all(uses[op] == 1 for op in (*each.turned, each.maker) if op >= 0)}  # fmt: skip


def _experts(
    graph: Graph, blocks: StepBlocks, root: int, readers: list[int]
) -> BatchedExperts | None:
    updates = [op for op in readers if graph.op_phase[op] == Phase.OPTIMIZER]
    ops = [op for op in dict.fromkeys(readers) if graph.op_phase[op] != Phase.OPTIMIZER]
    turning, products = _turned(graph, ops)
    of_blocks = {int(blocks.block_of[op]) for op in (*turning, *products)}
    counts = {count for op in products for count in _batches(graph, op)}
    if len(of_blocks) != 1 or len(counts) != 1 or len(updates) > 1:
        return None
    (count,) = counts
    is_whole = count > 1 and int(graph.tensor_bytes[root]) % count == 0
    chain = _gradient(graph, updates[0]) if updates else _Chain(-1)
    if not is_whole or chain is None or (updates and _batches(graph, chain.maker) != {count}):
        return None
    sources = {tensor: op for op in turning for tensor in graph.made_by(op)}
    turned = {op: tuple(_leading(graph, sources, op)) for op in products}
    used = {op for ops in turned.values() for op in ops}
    made = [t for op in (*turning, *chain.ops, chain.maker) if op >= 0 for t in graph.made_by(op)]
    return BatchedExperts(
        root=root, count=count, block=of_blocks.pop(), turned=turned, maker=chain.maker,
        gradient=tuple(sorted(chain.ops)),
        unused=frozenset(chain.unused.union(turning) - used),
        made=frozenset({int(graph.root_of[t]) for t in made} - {root}),
    )  # fmt: skip


def _turned(graph: Graph, ops: list[int]) -> tuple[list[int], list[int]]:
    """Ops that turn or cast a parameter, and those that read it, as it is or turned."""
    turning: list[int] = []
    products: list[int] = []
    pending = list(ops)
    while pending:
        op = pending.pop(0)
        if op in turning or op in products:
            continue
        if graph.kind_of(op) not in _TURNS:
            products.append(op)
            continue
        turning.append(op)
        for tensor in graph.made_by(op):
            pending += [u for u in graph.users_of(tensor).tolist()
                        if graph.op_phase[u] != Phase.OPTIMIZER]  # fmt: skip
    return turning, products


def _batches(graph: Graph, op: int) -> set[int]:
    """Numbers of matrices on each side of a batched product; 0 among them for any other op. Rows
    that are sorted by expert come with their counts per expert."""
    if graph.kind_of(op) not in (_PRODUCT, _SORTED) or graph.op_signature[op] < 0:
        return {0}
    shapes = tensor_shapes(graph.signatures[int(graph.op_signature[op])])
    of_rows = 2 if graph.kind_of(op) == _SORTED else 0
    return {shape[0] for shape in shapes if len(shape) != of_rows}


@dataclass
class _Chain:
    """Ops that make a gradient, and those that use it until its update."""

    maker: int
    ops: set[int] = field(default_factory=set)
    unused: set[int] = field(default_factory=set)


def _gradient(graph: Graph, update: int) -> _Chain | None:
    """The single chain of ops that makes the gradient of an update; None where it branches."""
    reads = [
        int(tensor)
        for tensor in graph.reads_of(update)
        if graph.tensor_role[tensor] not in PERSISTENT_ROLES and graph.tensor_bytes[tensor]
    ]
    if len(reads) != 1:
        return None
    chain = _Chain(-1)
    tensor, reader = reads[0], update
    while True:
        op = int(graph.tensor_producer[tensor])
        for other in graph.users_of(tensor).tolist():
            is_known = other == reader or other in chain.ops
            unused = set() if is_known else _unused(graph, other)
            if unused is None:
                return None
            chain.unused |= unused
        if op < 0:
            return None
        sources = graph.reads_of(op).tolist()
        if graph.kind_of(op) == _COPY:
            # A gradient that is laid out as its parameter is copied into a buffer allocated for it.
            made = [int(graph.tensor_producer[t]) for t in sources]
            buffer = [maker for maker in made if maker >= 0 and "empty" in graph.kind_of(maker)]
            chain.ops |= {op, *buffer}
            sources = [t for t, maker in zip(sources, made, strict=True) if maker not in buffer]
        elif graph.kind_of(op) in _TURNS:
            chain.ops.add(op)
        else:
            chain.maker = op
            return chain
        if len(sources) != 1:
            return None
        tensor, reader = sources[0], op


def _unused(graph: Graph, op: int) -> set[int] | None:
    """An op and those after it if none of their results is read; None otherwise."""
    found: set[int] = set()
    pending = [op]
    while pending:
        at = pending.pop()
        if graph.kind_of(at) not in _TURNS or any(graph.is_held[t] for t in graph.made_by(at)):
            return None
        found.add(at)
        pending += [u for t in graph.made_by(at) for u in graph.users_of(t).tolist()]
    return found


def _leading(graph: Graph, sources: Mapping[int, int], op: int) -> Iterator[int]:
    """The turns that lead to what an op reads, in order."""
    found: set[int] = set()
    pending = [op]
    while pending:
        for tensor in graph.reads_of(pending.pop()).tolist():
            before = sources.get(tensor)
            if before is not None and before not in found:
                found.add(before)
                pending.append(before)
    return iter(sorted(found))


def all_in_groups(experts: Mapping[int, BatchedExperts], wanted: int) -> dict[int, int]:
    """All such parameters in about so many groups; none where one is wanted."""
    return {r: each.num_groups(wanted) for r, each in experts.items()} if wanted > 1 else {}


def in_groups(experts: Mapping[int, BatchedExperts], memory: Memory) -> dict[int, int]:
    """Parameters that a section streams in groups of experts, and in how many. Where the loss goes
    in chunks, those of the last block are not."""
    last = len(memory.blocks) - 1
    chosen = {}
    for root, each in experts.items():
        policy = memory.blocks[each.block]
        if policy.expert_groups > 1 and not (each.block == last and memory.loss_chunks > 1):
            chosen[root] = each.num_groups(policy.expert_groups)
    return chosen


def parts_of(
    graph: Graph, experts: Mapping[int, BatchedExperts], groups: Mapping[int, int]
) -> LongArray:
    """Per tensor: in how many parts it exists one after the other; 1 for most."""
    parts = np.ones(graph.num_tensors, dtype=np.int64)
    for root, count in groups.items():
        parts[[root, *experts[root].made]] = count
    return parts
