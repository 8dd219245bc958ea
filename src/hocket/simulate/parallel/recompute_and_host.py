"""Activation checkpointing and host optimizer updates in an expanded graph.

A recomputed block (Chen et al. 2016, sublinear memory) saves only its input. Right before the first
of its backward ops that reads an output of the block, all ops that lead to such outputs run again.
Backward ops of the block read the recomputed outputs, so the original outputs are freed after the
forward pass. A host update (ZeRO-Offload, Ren et al. 2021) keeps the optimizer state on the host:
summed gradients are copied there in buckets, the host updates, and parameters are copied back, each
bucket by itself and overlapped with compute. O(ops + reads).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.graph.graph import Graph, Phase, Role, Stream
from hocket.hardware.host_route import HostRoute, host_route
from hocket.plan.problem import Problem
from hocket.simulate.parallel.batch_costs import gradients_of
from hocket.simulate.parallel.gradient_exchange import buckets
from hocket.simulate.parallel.graph_builder import CopiedNames, StepBuilder
from hocket.simulate.parallel.replica_copy import ReplicaCopy
from hocket.simulate.parallel.stage_order import places_of

_RECOMPUTE = "@recompute"


class SecondRun(NamedTuple):
    """Ops to recompute, and the reads that use their outputs."""

    ops: IntArray
    """Forward ops that are recomputed, ascending."""
    before: IntArray
    """Per recomputed op: the backward op right before which it runs."""
    block_of: IntArray
    """Per op of the graph: the recomputed block to whose forward or backward pass it belongs; -1
    for none."""
    is_read: BoolArray
    """Per read of the graph: True if a backward op reads an output that its own block
    recomputes."""

    def bases(self, graph: Graph, views: IntArray, tensor: IntArray, made: IntArray) -> IntArray:
        """Return the base tensors of views: the recomputed base if it is in the same block."""
        base = graph.alias_of[views]
        viewer, maker = graph.tensor_producer[views], graph.tensor_producer[base]
        is_own = self.block_of[np.maximum(viewer, 0)] == self.block_of[np.maximum(maker, 0)]
        found: IntArray = np.where(is_own & (made[base] >= 0), made[base], tensor[base])
        return found


@lru_cache(maxsize=256)
def second_run(graph: Graph, blocks: tuple[tuple[int, int], ...]) -> SecondRun:
    """Return the recomputation of blocks given as ranges of forward ops."""
    return second_run_of(graph, blocks_of(graph, blocks))


def blocks_of(graph: Graph, blocks: Sequence[tuple[int, int]]) -> IntArray:
    """Return the block of each forward op; -1 for none."""
    number = np.arange(graph.num_ops)
    block_of = np.full(graph.num_ops, -1, dtype=np.int32)
    for index, (start, stop) in enumerate(blocks):
        block_of[(number >= start) & (number < stop) & (graph.op_phase == Phase.FORWARD)] = index
    return block_of


def second_run_of(graph: Graph, block_of: IntArray) -> SecondRun:
    """Return the recomputation of blocks given by the block of each forward op."""
    in_forward = (block_of >= 0) & (graph.op_phase == Phase.FORWARD)
    block_of = np.where(in_forward, block_of, block_of[places_of(graph)])
    reader = graph.reader
    maker = graph.tensor_producer[graph.reads]
    is_made = (maker >= 0) & in_forward[np.maximum(maker, 0)]
    made_in = np.where(is_made, block_of[np.maximum(maker, 0)], -1)
    is_backward = graph.op_phase[reader] == Phase.BACKWARD
    is_read: BoolArray = is_backward & is_made & (made_in == block_of[reader])
    runs = np.zeros(graph.num_ops, dtype=np.bool_)
    runs[maker[is_read]] = True
    first = np.full(1 + int(block_of.max(initial=-1)), graph.num_ops)
    np.minimum.at(first, made_in[is_read], reader[is_read])
    # Backward through the block: ops that make inputs of recomputed ops are recomputed too.
    for op in np.flatnonzero(in_forward)[::-1].tolist():
        if runs[op]:
            makers = graph.tensor_producer[graph.reads_of(op)]
            makers = makers[makers >= 0]
            runs[makers[in_forward[makers] & (block_of[makers] == block_of[op])]] = True
    ops = np.flatnonzero(runs).astype(np.int32)
    return SecondRun(ops, first[block_of[ops]].astype(np.int32), block_of, is_read)


class Remade(NamedTuple):
    """Recomputed ops of one microbatch."""

    op: IntArray
    """Per op of the graph: its recomputed op; -1 for none."""
    priority: FloatArray
    """Per op of the graph: priority of its recomputed op."""


def recompute_ops(
    sized: Problem,
    own: ReplicaCopy,
    found: SecondRun,
    label: str,
    priority: FloatArray,
    builder: StepBuilder,
) -> Remade:
    """Add the recomputed ops of a microbatch, each block right before its first reader."""
    graph, ops = sized.graph, found.ops
    op_of = np.full(graph.num_ops, -1, dtype=np.int32)
    when = np.zeros(graph.num_ops)
    if not len(ops):
        return Remade(op_of, when)
    # Fractions between two priorities, so that recomputed ops run right before their reader.
    when[ops] = priority[found.before] - 1 + np.arange(1, len(ops) + 1) / (len(ops) + 1)
    op_of[ops] = builder.copy_ops(
        sized, ops, _RECOMPUTE + label, own.device_of, when, phase=Phase.BACKWARD
    )
    return Remade(op_of, when)


def recomputed_copies(
    graph: Graph,
    found: SecondRun,
    remade: Remade,
    tensor: IntArray,
    label: str,
    builder: StepBuilder,
) -> IntArray:
    """Add outputs and reads of recomputed ops; return each tensor's recomputed version, or -1."""
    op_of, producer = remade.op, graph.tensor_producer
    made = np.full(graph.num_tensors, -1, dtype=np.int32)
    tensors = np.flatnonzero((producer >= 0) & (op_of[producer] >= 0)).astype(np.int32)
    if not len(tensors):
        return made
    made[tensors] = builder.add_tensors(
        CopiedNames(graph.tensor_names, tensors, _RECOMPUTE + label),
        bytes=graph.tensor_bytes[tensors],
        role=Role.ACTIVATION,
        producer=op_of[producer[tensors]],
    )
    aliased = tensors[graph.alias_of[tensors] >= 0]
    builder.set_alias(made[aliased], found.bases(graph, aliased, tensor, made))
    reader = graph.reader
    chosen = op_of[reader] >= 0
    reads, reader = graph.reads[chosen], reader[chosen]
    maker = np.maximum(producer[reads], 0)
    # Outputs of other blocks are checkpoints: the original tensor is read.
    is_inner = (made[reads] >= 0) & (found.block_of[maker] == found.block_of[reader])
    builder.add_reads(op_of[reader], np.where(is_inner, made[reads], tensor[reads]))
    return made


# ── updates on the host ──────────────────────────────────────────────────────────────────────────


def lasting_bytes(graph: Graph, own: ReplicaCopy, tensors: IntArray) -> LongArray:
    """Return the device memory of tensors that persist between steps."""
    sizes = -(-graph.tensor_bytes[tensors] // own.num_shards)
    if own.replica.update == "host":
        sizes = np.where(graph.tensor_role[tensors] == Role.OPTIMIZER_STATE, 0, sizes)
    found: LongArray = sizes
    return found


def host_update_s(
    problem: Problem, own: ReplicaCopy, ops: IntArray, num_sharing: int
) -> FloatArray:
    """Return the seconds of host updates if ``num_sharing`` devices share host bandwidth."""
    # All devices of a host share its memory bandwidth.
    touched = problem.graph.bytes_touched[ops] / own.num_shards
    return np.tile(
        touched * num_sharing / problem.cluster.host_update_bps, (len(problem.costs.kind_names), 1)
    )


def copies_out(
    problem: Problem, own: ReplicaCopy, done: IntArray | None, builder: StepBuilder
) -> tuple[IntArray, list[tuple[IntArray, int]]]:
    """Copy summed gradients to the host.

    Returns, per tensor, the control tensor that signals its arrival, and the buckets with their
    bytes.
    """
    graph, gradients = problem.graph, gradients_of(problem.graph)
    owners = own.device_of[graph.tensor_producer[gradients]]
    sizes = -(-graph.tensor_bytes[gradients] // own.num_shards)
    filled = list(buckets(sizes, owners[None, :]))
    sent = [(gradients[members], int(sizes[members].sum())) for members in filled]
    there = np.full(graph.num_tensors, -1, dtype=np.int32)
    if not sent:
        return there, sent
    ops = _copies(problem, own, builder, sent, Stream.COPY_OUT)
    names = [f"out.{number}{own.label}#done" for number in range(len(sent))]
    signal = builder.add_tensors(names, role=Role.CONTROL, producer=ops)
    copied, bucket = np.concatenate([c for c, _ in sent]), _of_buckets(sent)
    builder.add_reads(ops[bucket], own.sums[copied])
    if done is not None:
        builder.add_reads(ops[bucket], done[copied])
    there[copied] = signal[bucket]
    return there, sent


def copies_in(
    problem: Problem,
    own: ReplicaCopy,
    sent: Sequence[tuple[IntArray, int]],
    op_of: IntArray,
    builder: StepBuilder,
) -> None:
    """Copy parameters to the device, each bucket once all its updates are done."""
    if not sent:
        return
    graph = problem.graph
    ops = _copies(problem, own, builder, sent, Stream.COPY_IN)
    bucket_of = np.full(graph.num_tensors, -1, dtype=np.int64)
    bucket_of[np.concatenate([copied for copied, _ in sent])] = _of_buckets(sent)
    reader = graph.reader
    bucket = bucket_of[graph.reads]
    is_update = (bucket >= 0) & (op_of[reader] >= 0)
    pairs = np.unique(bucket[is_update] * graph.num_ops + reader[is_update])
    users = pairs % graph.num_ops
    names = [f"updated.{user}{own.label}" for user in users.tolist()]
    signal = builder.add_tensors(names, role=Role.CONTROL, producer=op_of[users])
    builder.add_reads(ops[pairs // graph.num_ops], signal)


def _of_buckets(sent: Sequence[tuple[IntArray, int]]) -> LongArray:
    """Return the bucket of each gradient, in the order of the buckets."""
    return np.repeat(np.arange(len(sent)), [len(copied) for copied, _ in sent])


def _copies(
    problem: Problem,
    own: ReplicaCopy,
    builder: StepBuilder,
    sent: Sequence[tuple[IntArray, int]],
    stream: Stream,
) -> IntArray:
    """Add a copy between device and host for each bucket, one after another."""
    makers = problem.graph.tensor_producer[[int(copied[0]) for copied, _ in sent]]
    devices, is_out = own.device_of[makers], stream == Stream.COPY_OUT
    routes = [_route(problem, device) for device in devices.tolist()]
    seconds = [
        route.latency_s + size / (route.out_bps if is_out else route.in_bps)
        for route, (_, size) in zip(routes, sent, strict=True)
    ]
    word = "out" if is_out else "in"
    return builder.add_ops(
        [f"{word}.{number}{own.label}" for number in range(len(sent))],
        np.tile(seconds, (len(problem.costs.kind_names), 1)),
        kind=builder.kind("copy"), phase=Phase.OPTIMIZER, stream=stream, device=devices,
        priority=np.arange(len(sent), dtype=np.float64),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _route(problem: Problem, device: int) -> HostRoute:
    return host_route(problem.cluster, problem.cluster.devices[device])
