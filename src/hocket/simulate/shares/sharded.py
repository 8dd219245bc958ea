"""Parameters, gradients and state kept in parts: gathered block by block, scattered as they come.

Fully sharded data parallel (ZeRO 3, Rajbhandari et al. 2020; PyTorch's FSDP): replicas keep one
part of every block of parameters. The others gather it before the block's forward pass and again
before its backward pass, at most one block ahead, and drop it after; gradients of a block are
reduced and scattered as soon as they are whole. All replicas take part in every exchange, so they
have equally many microbatches, of any sizes. O(microbatches x blocks x replicas).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.cost.collectives import ring_all_reduce_s
from hocket.graph.graph import Graph, Phase, Role, Stream
from hocket.plan.problem import Problem
from hocket.simulate.shares.copies import ReplicaCopy
from hocket.simulate.shares.order import places_of
from hocket.simulate.shares.prices import best_ring, gradients_of
from hocket.simulate.shares.sheet import Sheet

_MOST_BLOCKS = 24


@dataclass(frozen=True, eq=False)
class ShardBlocks:
    """Blocks of parameters in the order of the forward pass."""

    num_blocks: int
    num_bytes: LongArray
    of_read: IntArray
    """Per read of the graph: the block whose parameters it needs; -1 for none."""
    of_gradient: IntArray
    """Per gradient that the optimizer reads."""


def exchange_shards(problem: Problem, copies: Sequence[ReplicaCopy], sheet: Sheet) -> None:
    """Add the gathers and scatters of all passes; sums of gradients are then shards."""
    graph = problem.graph
    blocks = find_blocks(graph)
    shards: list[IntArray | None] = [None] * blocks.num_blocks
    before: dict[Phase, dict[int, int]] = {phase: _first_ops(graph, blocks, phase) for phase in
                                           (Phase.FORWARD, Phase.BACKWARD)}  # fmt: skip
    for number in range(len(copies[0].passes)):
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            for block in before[phase]:
                after = _held_back(graph, before, phase, block, number)
                _gather(problem, copies, sheet, blocks, block, phase, number, after)
        for block in range(blocks.num_blocks):
            shards[block] = _scatter(problem, copies, sheet, blocks, block, number, shards[block])


def find_blocks(graph: Graph) -> ShardBlocks:
    """Consecutive parameters, at most `_MOST_BLOCKS` blocks of about equal bytes."""
    lasting = (graph.tensor_producer < 0) & (graph.tensor_role == Role.PARAMETER)
    tensors = np.flatnonzero(lasting & (graph.alias_of < 0))
    place = places_of(graph)[np.maximum(graph.home_op[tensors], 0)]
    tensors = tensors[np.argsort(place, kind="stable")]
    sizes = graph.tensor_bytes[tensors]
    before = np.cumsum(sizes) - sizes
    whole = max(int(sizes.sum()), 1)
    block = np.unique(before * _MOST_BLOCKS // whole, return_inverse=True)[1]
    of_tensor = np.full(graph.num_tensors, -1, dtype=np.int32)
    of_tensor[tensors] = block
    gradients = gradients_of(graph)
    of_gradient = np.zeros(len(gradients), dtype=np.int32)
    position = {int(tensor): index for index, tensor in enumerate(gradients)}
    for op in np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).tolist():
        reads = graph.reads_of(op)
        known = of_tensor[graph.root_of[reads]]
        for tensor in reads.tolist():
            if tensor in position and (known >= 0).any():
                of_gradient[position[tensor]] = known[known >= 0][0]
    num_blocks = int(block.max(initial=-1)) + 1
    return ShardBlocks(
        num_blocks=num_blocks,
        num_bytes=np.bincount(block, sizes, num_blocks).astype(np.int64),
        of_read=of_tensor[graph.root_of[graph.reads]],
        of_gradient=of_gradient,
    )


def _readers(graph: Graph) -> IntArray:
    return np.repeat(np.arange(graph.num_ops, dtype=np.int32), np.diff(graph.read_ptr))


def _first_ops(graph: Graph, blocks: ShardBlocks, phase: Phase) -> dict[int, int]:
    """By block, in the order in which the phase needs them: the first op that does."""
    reader = _readers(graph)
    chosen = (blocks.of_read >= 0) & (graph.op_phase[reader] == phase)
    first: dict[int, int] = {}
    for op, block in zip(reader[chosen].tolist(), blocks.of_read[chosen].tolist(), strict=True):
        first.setdefault(block, op)  # readers ascend
    return first


def _held_back(
    graph: Graph, before: dict[Phase, dict[int, int]], phase: Phase, block: int, number: int
) -> tuple[int, int] | None:
    """The pass and the op after which a block may be gathered, one ahead; None: at once."""
    first_ops = list(before[phase].values())
    at = first_ops.index(before[phase][block])  # of blocks that one op needs first, none waits
    if at:
        return number, first_ops[at - 1]
    if phase == Phase.BACKWARD:
        return number, int(np.flatnonzero(graph.op_phase == Phase.FORWARD)[-1])
    if number == 0:
        return None
    return number - 1, list(before[Phase.BACKWARD].values())[-1]


def _gather(
    problem: Problem,
    copies: Sequence[ReplicaCopy],
    sheet: Sheet,
    blocks: ShardBlocks,
    block: int,
    phase: Phase,
    number: int,
    after: tuple[int, int] | None,
) -> None:
    """One block's parameters on all replicas, for the ops of one phase of one pass."""
    graph, size = problem.graph, int(blocks.num_bytes[block])
    reader = _readers(graph)
    users = np.unique(reader[(blocks.of_read == block) & (graph.op_phase[reader] == phase)])
    waits = []
    for own in copies:
        if after is None:
            waits.append(np.zeros(0, dtype=np.int32))
            continue
        op = own.passes[after[0]].op[after[1]]
        waits.append(sheet.add_tensors([f"through.{op}"], role=Role.CONTROL, producer=[op]))
    priority = float(copies[0].passes[number].priority[users[0]]) - 0.5
    label = f"gather.{block}.{phase.name.lower()}#{number}"
    ops = _together(problem, copies, sheet, label, size, priority, waits)
    held = sheet.add_tensors(
        [f"{label}{own.label}" for own in copies], bytes=size, role=Role.ACTIVATION, producer=ops
    )
    for own, tensor in zip(copies, held, strict=True):
        sheet.add_reads(own.passes[number].op[users], np.full(len(users), tensor))


def _scatter(
    problem: Problem,
    copies: Sequence[ReplicaCopy],
    sheet: Sheet,
    blocks: ShardBlocks,
    block: int,
    number: int,
    shards: IntArray | None,
) -> IntArray | None:
    """One block's gradients of one pass, reduced; each replica keeps its shard of the sum."""
    graph = problem.graph
    members = gradients_of(graph)[blocks.of_gradient == block]
    if not len(members):
        return shards
    size = int(graph.tensor_bytes[members].sum())
    waits = [own.passes[number].tensor[members] for own in copies]
    makers = graph.tensor_producer[members]
    priority = float(copies[0].passes[number].priority[makers].max()) + 0.25
    label = f"scatter.{block}#{number}"
    ops = _together(problem, copies, sheet, label, size, priority, waits)
    made = sheet.add_tensors(
        [f"{label}{own.label}" for own in copies],
        bytes=-(-size // len(copies)), role=Role.GRADIENT, producer=ops,
        alias=-1 if shards is None else shards,
    )  # fmt: skip
    if shards is not None:
        sheet.add_reads(ops, shards)
    for own, shard in zip(copies, made, strict=True):
        own.sums[members] = shard
    return made


def _together(
    problem: Problem,
    copies: Sequence[ReplicaCopy],
    sheet: Sheet,
    label: str,
    size: int,
    priority: float,
    waits: Sequence[IntArray],
) -> IntArray:
    """An exchange that begins when all replicas are ready for it, in a ring."""
    devices = [int(own.device_of[0]) for own in copies]
    ring = best_ring(problem, tuple(devices))
    # Gathering and scattering are the two halves of an all-reduce.
    whole_s = ring_all_reduce_s(size, len(copies), ring.latency_s, ring.bandwidth_bps)
    seconds = float(whole_s) / 2
    num_kinds = len(problem.costs.kind_names)
    common = {"kind": sheet.kind("exchange"), "phase": Phase.BACKWARD,
              "stream": Stream.COMMUNICATION, "device": devices}  # fmt: skip
    names = [f"{label}{own.label}" for own in copies]
    ready = sheet.add_ops(
        [f"{name}/ready" for name in names], np.zeros((num_kinds, len(copies))),
        priority=priority, **common,
    )  # fmt: skip
    for op, tensors in zip(ready, waits, strict=True):
        sheet.add_reads(np.full(len(tensors), op), tensors)
    told = sheet.add_tensors([f"{n}#ready" for n in names], role=Role.CONTROL, producer=ready)
    ops = sheet.add_ops(
        names, np.full((num_kinds, len(copies)), seconds), priority=priority + 0.1, **common
    )
    sheet.add_reads(np.repeat(ops, len(copies)), np.tile(told, len(copies)))
    return ops
