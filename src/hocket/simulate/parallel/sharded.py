"""Fully sharded data parallelism in an expanded graph: all-gathers and reduce-scatters per block.

In fully sharded data parallelism (ZeRO 3, Rajbhandari et al. 2020; PyTorch's FSDP) each replica
keeps one shard of every block of parameters. A block is all-gathered before its forward pass and
again before its backward pass, at most one block ahead, and dropped after each. Gradients of a
block are reduce-scattered as soon as they are complete. All replicas participate in every
collective, so they have equally many microbatches, of any sizes. O(microbatches x blocks x
replicas).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import IntArray, LongArray
from hocket.cost.collectives import ring_all_reduce_s
from hocket.graph.graph import Graph, Phase, Role, Stream
from hocket.plan.problem import Problem
from hocket.simulate.parallel.batch_costs import best_ring, gradients_of
from hocket.simulate.parallel.exchanges import Exchanges, all_reduced_bytes, exchange_all
from hocket.simulate.parallel.graph_builder import StepBuilder
from hocket.simulate.parallel.recompute_and_host import SecondRun, second_run
from hocket.simulate.parallel.replica_copy import ReplicaCopy
from hocket.simulate.parallel.stage_order import places_of

PASSES = (Phase.FORWARD, Phase.BACKWARD)
_MOST_BLOCKS = 24
_NEXT = 1e-5
"""Priority offset so small that no other op lies between; recomputed ops are close together."""


class Use(NamedTuple):
    """An op that needs the parameters of a block."""

    op: int
    """Op of the given graph."""
    is_recompute: bool
    """True if the recomputed op needs the parameters, not the first run."""


@dataclass(frozen=True, eq=False)
class ShardBlocks:
    """Blocks of parameters in the order of the forward pass."""

    num_blocks: int
    num_bytes: LongArray
    of_read: IntArray
    """Per read of the graph: the block of the parameter that is read; -1 for none."""
    of_gradient: IntArray
    """Per gradient that the optimizer reads: the block of its parameter."""


def exchange_shards(problem: Problem, copies: Sequence[ReplicaCopy], builder: StepBuilder) -> None:
    """Add all all-gathers and reduce-scatters; sums of gradients then are shards."""
    graph = problem.graph
    blocks = find_blocks(graph)
    shards: list[IntArray | None] = [None] * blocks.num_blocks
    recompute = second_run(graph, copies[0].replica.recomputed)  # the same for all
    uses = {phase: _uses(graph, blocks, phase, recompute) for phase in PASSES}
    for number in range(len(copies[0].passes)):
        for phase in PASSES:
            for block in uses[phase]:
                after = _held_back(graph, uses, phase, block, number)
                _gather(problem, copies, builder, blocks, block, phase, number, uses[phase], after)
        for block in range(blocks.num_blocks):
            shards[block] = _scatter(problem, copies, builder, blocks, block, number, shards[block])


def find_blocks(graph: Graph) -> ShardBlocks:
    """Split consecutive parameters into at most `_MOST_BLOCKS` blocks of about equal bytes."""
    lasting = (graph.tensor_producer < 0) & (graph.tensor_role == Role.PARAMETER)
    tensors = np.flatnonzero(lasting & (graph.alias_of < 0))
    place = places_of(graph)[np.maximum(graph.owner_op[tensors], 0)]
    tensors = tensors[np.argsort(place, kind="stable")]
    sizes = graph.tensor_bytes[tensors]
    before = np.cumsum(sizes) - sizes
    # Blocks by position in the total bytes, so that all are about equally large.
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


def _uses(
    graph: Graph, blocks: ShardBlocks, phase: Phase, recompute: SecondRun
) -> dict[int, list[Use]]:
    """Return the uses of each block of parameters, in the order in which a pass needs the blocks.

    A backward pass also needs the blocks that its recomputed ops read.
    """
    reader = graph.reader
    is_recomputed = np.zeros(graph.num_ops, dtype=np.bool_)
    is_recomputed[recompute.ops] = phase == Phase.BACKWARD
    # Recomputed ops run right before the backward op that needs them, in their own order.
    when = np.arange(graph.num_ops, dtype=np.float64)
    if phase == Phase.BACKWARD:
        when[recompute.ops] = recompute.before - 1 + recompute.ops / graph.num_ops
    chosen = (blocks.of_read >= 0) & ((graph.op_phase[reader] == phase) | is_recomputed[reader])
    ops, block = reader[chosen], blocks.of_read[chosen]
    found: dict[int, list[Use]] = {}
    for index in np.argsort(when[ops], kind="stable").tolist():
        op = int(ops[index])
        use = Use(op, bool(is_recomputed[op]))
        members = found.setdefault(int(block[index]), [])
        if not members or members[-1] != use:
            members.append(use)
    return found


def _held_back(
    graph: Graph, uses: dict[Phase, dict[int, list[Use]]], phase: Phase, block: int, number: int
) -> tuple[int, Use] | None:
    """Return the op that must start before a block is gathered, so that one block is prefetched.

    It is given by its microbatch and its use; None for the first gather of the step.
    """
    first = [members[0] for members in uses[phase].values()]
    # Blocks that the same op needs first have the same position and do not wait for each other.
    at = first.index(uses[phase][block][0])
    if at:
        return number, first[at - 1]
    if phase == Phase.BACKWARD:
        return number, Use(int(np.flatnonzero(graph.op_phase == Phase.FORWARD)[-1]), False)
    if number == 0:
        return None
    return number - 1, list(uses[Phase.BACKWARD].values())[-1][0]


def _op_of(own: ReplicaCopy, number: int, use: Use) -> int:
    one = own.passes[number]
    return int(one.recompute[use.op] if use.is_recompute else one.op[use.op])


def _gather(
    problem: Problem,
    copies: Sequence[ReplicaCopy],
    builder: StepBuilder,
    blocks: ShardBlocks,
    block: int,
    phase: Phase,
    number: int,
    uses: dict[int, list[Use]],
    after: tuple[int, Use] | None,
) -> None:
    """Add the all-gather of one block's parameters, for one phase of one microbatch."""
    size, users = int(blocks.num_bytes[block]), uses[block]
    waits = []
    for own in copies:
        if after is None:
            waits.append(np.zeros(0, dtype=np.int32))
            continue
        op = _op_of(own, *after)
        waits.append(builder.add_tensors([f"through.{op}"], role=Role.CONTROL, producer=[op]))
    first, one = users[0], copies[0].passes[number]
    when = one.recompute_priority if first.is_recompute else one.priority
    label = f"gather.{block}.{phase.name.lower()}#{number}"
    # Half a step before the op that needs the block.
    ops = together(problem, copies, builder, label, size, float(when[first.op]) - 0.5, waits)
    held = builder.add_tensors(
        [f"{label}{own.label}" for own in copies], bytes=size, role=Role.ACTIVATION, producer=ops
    )
    for own, tensor in zip(copies, held, strict=True):
        readers = [_op_of(own, number, use) for use in users]
        builder.add_reads(np.array(readers), np.full(len(readers), tensor))


def _scatter(
    problem: Problem,
    copies: Sequence[ReplicaCopy],
    builder: StepBuilder,
    blocks: ShardBlocks,
    block: int,
    number: int,
    shards: IntArray | None,
) -> IntArray | None:
    """Add the reduce-scatter of a block's gradients of one microbatch; return the shards."""
    graph = problem.graph
    members = gradients_of(graph)[blocks.of_gradient == block]
    if not len(members):
        return shards
    size = int(graph.tensor_bytes[members].sum())
    waits = [own.passes[number].tensor[members] for own in copies]
    makers = graph.tensor_producer[members]
    priority = float(copies[0].passes[number].priority[makers].max()) + 0.25
    label = f"scatter.{block}#{number}"
    ops = together(problem, copies, builder, label, size, priority, waits, is_scatter=True)
    made = builder.add_tensors(
        [f"{label}{own.label}" for own in copies],
        bytes=-(-size // copies[0].num_shards), role=Role.GRADIENT, producer=ops,
        alias_of=-1 if shards is None else shards,
    )  # fmt: skip
    if shards is not None:
        builder.add_reads(ops, shards)
    for own, shard in zip(copies, made, strict=True):
        own.sums[members] = shard
    return made


def together(
    problem: Problem,
    copies: Sequence[ReplicaCopy],
    builder: StepBuilder,
    label: str,
    size: int,
    priority: float,
    waits: Sequence[IntArray],
    *,
    is_scatter: bool = False,
) -> IntArray:
    """Add a ring all-gather or reduce-scatter that starts when all replicas are ready.

    Each takes half the time of a ring all-reduce. CPUs exchange by gloo, whose reduce-scatter is an
    all-reduce inside, and FSDP2 waits there for each collective instead of overlapping it.
    """
    devices = np.array([int(own.device_of[0]) for own in copies])
    peers = tuple(int(device_of[0]) for device_of in copies[0].peers)
    by_gloo = any(problem.cluster.devices[peer].kind.is_cpu for peer in peers)
    ring = best_ring(problem, peers)
    whole_s = ring_all_reduce_s(size, len(peers), ring.latency_s, ring.bandwidth_bps)
    exchange = Exchanges(
        names=(label,),
        labels=tuple(own.label for own in copies),
        devices=devices[None, :],
        seconds=np.array([float(whole_s) / (1 if is_scatter and by_gloo else 2)]),
        sent_bytes=all_reduced_bytes(np.array([size]), len(peers)) // 2,
        ready_priority=np.full((1, len(copies)), priority),
        priority=np.full((1, len(copies)), priority + _NEXT),
    )
    at = np.repeat(np.arange(len(copies)), [len(tensors) for tensors in waits]).astype(np.int64)
    waiting = np.concatenate([np.zeros(0, dtype=np.int32), *waits]), at
    found: IntArray = exchange_all(
        builder, "exchange", exchange, waiting, len(problem.costs.kind_names),
        stream=Stream.COMPUTE if by_gloo else Stream.COMMUNICATION,
    )[0]  # fmt: skip
    return found
