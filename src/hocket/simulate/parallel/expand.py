"""Expand a parallel plan into one graph: each replica's microbatches, sums, collectives and
updates.

Every forward and backward op occurs once per microbatch, with the cost of that microbatch's size,
on the device of its stage. Parameters and their updates occur once per replica. From the second
microbatch on, gradients are added to their sums. Replicas all-reduce gradients in buckets, in the
order in which buckets are ready and overlapped with the backward pass, as PyTorch's
DistributedDataParallel does: one op on the communication stream of each device, which starts when
all replicas have the bucket and takes the time of a ring over their links. The simulator then times
the graph like any other. O(replicas x microbatches x (ops + tensors)), numpy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.cost.collectives import ring_all_reduce_s
from hocket.cost.costs import Costs
from hocket.graph.graph import Graph, Phase, Role, Stream
from hocket.plan.problem import Problem
from hocket.plan.sections import Communication, Parallel, Waves
from hocket.plan.sections.waves import NUM_STREAMS
from hocket.simulate.parallel.batch_costs import (
    ACCUMULATE,
    accumulate_demand,
    accumulate_s,
    best_ring,
    gradients_of,
    priced_at,
)
from hocket.simulate.parallel.exchanges import (
    Exchanges,
    JoinedNames,
    all_reduced_bytes,
    exchange_all,
)
from hocket.simulate.parallel.gradient_exchange import exchange_alike
from hocket.simulate.parallel.graph_builder import CopiedNames, StepBuilder
from hocket.simulate.parallel.recompute_and_host import (
    copies_in,
    copies_out,
    host_update_s,
    lasting_bytes,
    recompute_ops,
    recomputed_copies,
    second_run,
)
from hocket.simulate.parallel.replica_copy import Pass, ReplicaCopy
from hocket.simulate.parallel.sharded import exchange_shards
from hocket.simulate.parallel.stage_order import pass_kinds, slots, stages_of
from hocket.simulate.parallel.tensor_parallel import Regions, one_part, regions_of
from hocket.simulate.parallel.wave_streams import (
    add_waits,
    on_stream,
    updates_per_step,
    with_updates,
)
from hocket.simulate.symmetry import is_symmetric, shared_bandwidth_bps, stage_devices

# Tensor-parallel shards in the expanded graph: partial results are all-reduced at their borders.
#
# All devices of a stage have the same samples and a shard of every split op each. An all-reduce
# starts when all devices have their partial results, and readers wait for it. If a block is
# recomputed before its backward pass, so are the all-reduces inside it. O(sums x devices).

_NEXT = 0.25
"""Priority offset that puts an all-reduce after an op and before the next op."""
_CLOSE = 1e-6
"""The same offset for recomputed ops, whose priorities are close together."""
_BEGIN = 1e-5
"""Priority offset from a collective's ready op to the collective itself."""


def join_parts(
    problem: Problem,
    regions: Regions,
    copies: Sequence[ReplicaCopy],
    degree: int,
    builder: StepBuilder,
) -> None:
    """Add the all-reduces of tensor parallelism within every replica."""
    for start in range(0, len(copies), degree):
        group = copies[start : start + degree]  # fewer where one represents all
        for number in range(len(group[0].replica.microbatches)):
            for runs in (_first_runs(group, number), _second_runs(group, number)):
                _sum_all(problem, regions, group, number, runs, builder)


class _MicrobatchRuns(NamedTuple):
    """First or recomputed run of a microbatch's ops on all tensor-parallel ranks."""

    op: list[IntArray]
    """Per tensor-parallel rank and op of the graph: its expanded op; -1 if it does not run."""
    priority: list[FloatArray]
    tensor: list[IntArray] | None
    """Per tensor-parallel rank and tensor of the graph: its expanded tensor; None for recomputed
    runs."""
    close: float
    label: str


def _first_runs(group: Sequence[ReplicaCopy], number: int) -> _MicrobatchRuns:
    passes = [own.passes[number] for own in group]
    return _MicrobatchRuns(
        [p.op for p in passes], [p.priority for p in passes], [p.tensor for p in passes], _NEXT,
        f"#{number}",
    )  # fmt: skip


def _second_runs(group: Sequence[ReplicaCopy], number: int) -> _MicrobatchRuns:
    passes = [own.passes[number] for own in group]
    return _MicrobatchRuns(
        [p.recompute for p in passes], [p.recompute_priority for p in passes], None, _CLOSE,
        f"#{number}@recompute",
    )  # fmt: skip


def _sum_all(
    problem: Problem,
    regions: Regions,
    group: Sequence[ReplicaCopy],
    number: int,
    runs: _MicrobatchRuns,
    builder: StepBuilder,
) -> None:
    """Add the tensor-parallel all-reduces of one run."""
    makers = np.array([each.maker for each in regions.sums])
    runs_here = runs.op[0][makers] >= 0
    sums = [each for each, is_here in zip(regions.sums, runs_here, strict=True) if is_here]
    if not sums:
        return
    makers, num_parts = makers[runs_here], len(group[0].parts_peers)
    sized = priced_at(problem, group[0].replica.microbatches[number]).graph
    devices = np.stack([own.device_of[makers] for own in group], axis=1)
    peers = np.stack([device_of[makers] for device_of in group[0].parts_peers], axis=1)
    rings = [best_ring(problem, tuple(row)) for row in peers.tolist()]
    when = np.stack([priority[makers] for priority in runs.priority], axis=1) + runs.close
    sizes = sized.tensor_bytes[[each.tensor for each in sums]]
    exchanges = Exchanges(
        names=tuple(f"sum.{maker}{runs.label}" for maker in makers.tolist()),
        labels=tuple(own.label for own in group),
        devices=devices,
        ready_priority=when,
        priority=when + _BEGIN,
        seconds=ring_all_reduce_s(
            sizes, num_parts,
            [ring.latency_s for ring in rings], [ring.bandwidth_bps for ring in rings],
        ),
        sent_bytes=all_reduced_bytes(sizes, num_parts),
    )  # fmt: skip
    waiting = _waits(sized, makers, runs, builder)
    ops = exchange_all(builder, "exchange", exchanges, waiting, len(problem.costs.kind_names))
    names = JoinedNames(exchanges.names, exchanges.labels, "#done")
    signal = builder.add_tensors(names, role=Role.CONTROL, producer=ops.ravel()).reshape(ops.shape)
    for part, op_of in enumerate(runs.op):
        readers = op_of[np.concatenate([each.readers for each in sums])]
        done = np.repeat(signal[:, part], [len(each.readers) for each in sums])
        builder.add_reads(readers[readers >= 0], done[readers >= 0])


def _waits(
    sized: Graph, makers: LongArray, runs: _MicrobatchRuns, builder: StepBuilder
) -> tuple[IntArray, LongArray]:
    """Return tensors that all-reduces wait for, and the flat position of the waiting op of each."""
    num_parts, number = len(runs.op), np.arange(len(makers))
    if runs.tensor is None:
        # Recomputed runs have no tensors in the table, but the ends of their ops are known.
        found = [
            builder.add_tensors([""] * len(makers), role=Role.CONTROL, producer=op_of[makers])
            for op_of in runs.op
        ]
        at = [number * num_parts + part for part in range(num_parts)]
        return np.concatenate(found), np.concatenate(at)
    made = [sized.made_by(int(maker)) for maker in makers]
    flat = np.concatenate([np.array(some, dtype=np.int64) for some in made])
    number = np.repeat(number, [len(some) for some in made])
    return (
        np.concatenate([tensor[flat] for tensor in runs.tensor]),
        np.concatenate([number * num_parts + part for part in range(num_parts)]),
    )


# Gradients that microbatches accumulate, and the ops that run once after that.

_SUM = "aten.add"


@lru_cache(maxsize=64)
def added_parts(graph: Graph, cuts: tuple[int, ...]) -> tuple[IntArray, IntArray]:
    """Return the tensors that microbatches accumulate, and the ops that run once after that.

    The tensors are gradients. If two stages use a weight, each stage accumulates its own part of
    the gradient and one op per step adds the parts; otherwise every microbatch would send a
    gradient.
    """
    gradients, stage = gradients_of(graph), stages_of(graph, cuts)
    maker = graph.tensor_producer[gradients]
    parts: list[int] = []
    finals: list[int] = []
    for gradient, op in zip(gradients.tolist(), maker.tolist(), strict=True):
        # A weight that several stages read has its gradient as a sum of their parts.
        reads = graph.reads_of(op)
        sources = graph.tensor_producer[reads]
        is_sum = graph.kind_of(op) == _SUM and len(reads) > 1 and bool((sources >= 0).all())
        if is_sum and bool((stage[sources] != stage[op]).any()):
            parts += reads.tolist()
            finals.append(op)
        else:
            parts.append(gradient)
    return np.array(parts, dtype=np.int32), np.array(finals, dtype=np.int32)


_LATE = 1e15
"""Priority of updates, after all forward and backward passes."""


@dataclass(frozen=True, eq=False)
class ExpandedStep:
    """The expanded graph as a problem, with the device and the priority of each op."""

    problem: Problem
    device_of: IntArray
    priority: FloatArray
    is_strict: bool
    """True if devices run ops in exactly the order of priorities: in pipelines and waves, with
    tensor parallelism (ranks must not run another microbatch while they wait for all-reduces), and
    with recomputation (a block must not be recomputed too early)."""
    passes: tuple[IntArray, ...]
    """Per replica [microbatch, op of the given graph]: its expanded op; -1 if it runs once per
    step."""
    stands_for: IntArray | None = None
    """[rank, stage]: devices, of which only those of the first rank were simulated and stand for
    the others. None if all were simulated."""


def expand(
    problem: Problem,
    parallel: Parallel,
    planned: Communication | None = None,
    waves: Waves | None = None,
    *,
    is_named: bool = True,
) -> ExpandedStep:
    """Return the graph of all ops of a step under a parallel section.

    ``planned`` is the collective for gradients and is used if it is for exactly the devices of the
    replicas. With ``waves`` microbatches run in turn on two streams.
    """
    stands_for = None
    # Symmetric replicas run in lockstep, so one of them is enough.
    if waves is None and is_symmetric(problem, parallel):
        stands_for = stage_devices(problem, parallel)
    regions, degree = None, 1
    if parallel.tensor > 1:
        regions, degree = regions_of(problem.graph), parallel.tensor
        problem, parallel = one_part(problem, degree), parallel.part_by_part()
    graph = problem.graph
    builder = StepBuilder(kinds=list(graph.kinds), modules=graph.modules, is_named=is_named)
    owners = _owners(problem, parallel)
    kept = parallel.replicas if stands_for is None else parallel.replicas[:1]
    copies = []
    for index in range(len(kept)):
        first = index // degree * degree
        peers, parts_peers = owners[index % degree :: degree], owners[first : first + degree]
        copies.append(_replicate(problem, parallel, index, peers, parts_peers, waves, builder))
    num_updates = updates_per_step(copies[0], waves)
    done: dict[int, IntArray] = {}
    if regions is not None:
        join_parts(problem, regions, copies, degree, builder)
    if parallel.sharded:
        exchange_shards(problem, copies, builder)
    for own in copies:
        _finish(problem, own, builder)
    if not parallel.sharded:
        done = exchange_alike(problem, copies, degree, planned, builder, num_updates)
    num_hosted = Counter(
        _host(problem, name) for replica in parallel.replicas if replica.update == "host"
        for name in replica.devices
    )  # fmt: skip
    for index, own in enumerate(copies):
        num_sharing = num_hosted[_host(problem, own.replica.devices[0])]
        _update(with_updates(problem, num_updates), own, done.get(index), num_sharing, builder)
    expanded = builder.graph(graph.name, {**graph.meta, "unfolded": True})
    demand = None if waves is None else builder.demand()
    costs = _costs(problem.costs, builder.op_s(), demand, expanded)
    # One replica stands for all, so channels that all use at once are divided among them.
    if stands_for is not None and stands_for.shape[1] > 1:
        shared_bps = shared_bandwidth_bps(problem, stands_for)
        costs = replace(costs, routes=replace(costs.routes, channel_bandwidth_bps=shared_bps))
    is_ordered = waves is not None or regions is not None
    is_strict = is_ordered or any(len(r.devices) > 1 or r.recomputed for r in parallel.replicas)
    return ExpandedStep(
        problem=replace(problem, work=expanded, op_costs=costs),
        device_of=builder.column("device").astype(np.int32),
        priority=builder.column("priority").astype(np.float64),
        is_strict=is_strict,
        passes=tuple(np.stack([builder.placed(p.op) for p in own.passes]) for own in copies),
        stands_for=stands_for,
    )


def _owners(problem: Problem, parallel: Parallel) -> list[IntArray]:
    """Return, per replica and op of the graph, the device of its stage."""
    number = problem.cluster.number_of
    return [
        np.array([number[name] for name in replica.devices], dtype=np.int32)[
            stages_of(problem.graph, replica.cuts)
        ]
        for replica in parallel.replicas
    ]


def _host(problem: Problem, device: str) -> str:
    return problem.cluster.devices[problem.cluster.number_of[device]].host


def _costs(costs: Costs, op_s: FloatArray, demand: FloatArray | None, graph: Graph) -> Costs:
    return replace(
        costs, op_s=op_s, op_source=np.zeros(op_s.shape, dtype=np.uint8), demand=demand,
        tensor_bytes=graph.tensor_bytes,
    )  # fmt: skip


# ── forward and backward ─────────────────────────────────────────────────────────────────────────


def _replicate(
    problem: Problem,
    parallel: Parallel,
    index: int,
    peers: list[IntArray],
    parts_peers: list[IntArray],
    waves: Waves | None,
    builder: StepBuilder,
) -> ReplicaCopy:
    """Add a replica: its parameters once, its forward and backward ops once per microbatch."""
    graph, replica = problem.graph, parallel.replicas[index]
    stage = stages_of(graph, replica.cuts)
    label = f"@{replica.devices[0]}" if len(parallel.replicas) > 1 else ""
    parts, finals = added_parts(graph, replica.cuts)
    own = ReplicaCopy(
        replica=replica,
        device_of=parts_peers[index % len(parts_peers)],
        peers=peers,
        parts_peers=parts_peers,
        tensor=np.full(graph.num_tensors, -1, dtype=np.int32),
        parts=parts,
        finals=finals,
        label=label,
        sums=np.full(graph.num_tensors, -1, dtype=np.int32),
        num_shards=len(parallel.replicas) if parallel.sharded else 1,
    )
    is_lasting = (graph.tensor_producer < 0) & (graph.tensor_role != Role.INPUT)
    lasting = np.flatnonzero(is_lasting).astype(np.int32)
    own.tensor[lasting] = builder.add_tensors(
        CopiedNames(graph.tensor_names, lasting, label),
        bytes=lasting_bytes(graph, own, lasting),
        role=graph.tensor_role[lasting],
    )
    aliased = lasting[graph.alias_of[lasting] >= 0]
    builder.set_alias(own.tensor[aliased], own.tensor[graph.alias_of[aliased]])
    order = slots(len(replica.devices), len(replica.microbatches), parallel.schedule)
    kind = pass_kinds(graph, replica.cuts, parallel.schedule)
    for microbatch, size in enumerate(replica.microbatches):
        start = order[stage, kind, microbatch] * float(graph.num_ops)
        sized = priced_at(problem, size)
        if waves is not None:
            sized = on_stream(sized, microbatch % NUM_STREAMS)
        _run_microbatch(problem, own, microbatch, sized, start, builder)
    if waves is not None:
        add_waits(graph, own, waves, builder)
    return own


def _run_microbatch(
    problem: Problem,
    own: ReplicaCopy,
    microbatch: int,
    sized: Problem,
    start: FloatArray,
    builder: StepBuilder,
) -> None:
    graph, num_microbatches = sized.graph, len(own.replica.microbatches)
    label = own.label + (f"#{microbatch}" if num_microbatches > 1 else "")
    is_repeated = graph.op_phase != Phase.OPTIMIZER
    is_repeated[own.finals] = False
    ops = np.flatnonzero(is_repeated).astype(np.int32)
    priority = start + np.arange(graph.num_ops)
    op_of = np.full(graph.num_ops, -1, dtype=np.int32)
    recompute = second_run(problem.graph, own.replica.recomputed)
    # Recomputed ops are inserted between the passes, so that the order of adding is topological.
    is_forward = graph.op_phase[ops] == Phase.FORWARD
    forward, backward = ops[is_forward], ops[~is_forward]
    op_of[forward] = builder.copy_ops(sized, forward, label, own.device_of, priority)
    remade = recompute_ops(sized, own, recompute, label, priority, builder)
    op_of[backward] = builder.copy_ops(sized, backward, label, own.device_of, priority)
    given = np.flatnonzero((graph.tensor_producer < 0) & (graph.tensor_role == Role.INPUT))
    tensors = np.union1d(_made(graph, op_of), given).astype(np.int32)
    role = graph.tensor_role.copy()
    if microbatch or own.num_shards > 1:
        # Only the first microbatch's gradients stay; later ones are freed once they are added. With
        # sharded gradients, full ones are freed once they are reduce-scattered.
        role[role == Role.GRADIENT] = Role.ACTIVATION
    else:
        role[own.parts] = Role.GRADIENT
    own.tensor[tensors] = _add_tensors(builder, graph, tensors, op_of, label, role[tensors])
    made = recomputed_copies(graph, recompute, remade, own.tensor, label, builder)
    aliased = tensors[graph.alias_of[tensors] >= 0]
    is_late = graph.op_phase[graph.tensor_producer[aliased]] == Phase.BACKWARD
    early, late = aliased[~is_late], aliased[is_late]
    builder.set_alias(own.tensor[early], own.tensor[graph.alias_of[early]])
    builder.set_alias(own.tensor[late], recompute.bases(graph, late, own.tensor, made))
    _add_reads(
        builder, graph, op_of, own.tensor, np.where(recompute.is_read, made[graph.reads], -1)
    )
    own.passes.append(Pass(op_of, own.tensor.copy(), priority, remade.op, remade.priority))
    if own.num_shards > 1:
        return
    if microbatch:
        _accumulate(problem, own, label, priority, graph.op_stream, builder)
    else:
        own.sums[own.parts] = own.tensor[own.parts]


def _accumulate(
    problem: Problem,
    own: ReplicaCopy,
    label: str,
    priority: FloatArray,
    op_stream: NDArray[np.int8],
    builder: StepBuilder,
) -> None:
    """Add the ops that add a microbatch's gradients to their sums, each as soon as it is made."""
    graph, parts = problem.graph, own.parts
    maker, sizes = graph.tensor_producer[parts], graph.tensor_bytes[parts]
    added = builder.add_ops(
        CopiedNames(graph.op_names, maker, f"+{label}"),
        accumulate_s(problem, tuple(parts.tolist())),
        accumulate_demand(problem, tuple(parts.tolist())),
        kind=builder.kind(ACCUMULATE),
        module=graph.op_module[maker],
        phase=Phase.BACKWARD,
        flops=sizes / 4,
        bytes_touched=3 * sizes,
        device=own.device_of[maker],
        stream=op_stream[maker],
        priority=priority[maker] + 0.5,
    )
    builder.add_reads(np.tile(added, 2), np.concatenate((own.sums[parts], own.tensor[parts])))
    own.sums[parts] = builder.add_tensors(
        CopiedNames(graph.tensor_names, parts, f"+{label}"),
        bytes=sizes,
        role=Role.GRADIENT,
        producer=added,
        alias_of=own.sums[parts],
    )


def _made(graph: Graph, op_of: IntArray) -> IntArray:
    """Return the tensors whose producers have an expanded op."""
    is_own = np.append(op_of >= 0, False)  # -1 reads the last entry, which is no op
    return np.flatnonzero(is_own[graph.tensor_producer]).astype(np.int32)


def _add_tensors(
    builder: StepBuilder, graph: Graph, tensors: IntArray, op_of: IntArray, label: str, role: Any
) -> IntArray:
    producer = graph.tensor_producer[tensors]
    return builder.add_tensors(
        CopiedNames(graph.tensor_names, tensors, label),
        bytes=graph.tensor_bytes[tensors],
        role=role,
        producer=np.where(producer >= 0, op_of[producer], -1),
    )


def _add_reads(
    builder: StepBuilder,
    graph: Graph,
    op_of: IntArray,
    tensor: IntArray,
    instead: IntArray | None = None,
) -> None:
    """Add the reads of ops; entries of ``instead`` that are not -1 replace the graph's reads."""
    reader = op_of[graph.reader]
    kept = reader >= 0
    read = tensor[graph.reads]
    if instead is not None:
        read = np.where(instead >= 0, instead, read)
    builder.add_reads(reader[kept], read[kept])


# ── finish, exchange and update ───────────────────────────────────────────────────────────────────


def _finish(problem: Problem, own: ReplicaCopy, builder: StepBuilder) -> None:
    """Add the ops that combine gradients of shared weights once per step."""
    graph, ops = problem.graph, own.finals
    if len(ops):
        # After the last accumulation, before all updates.
        priority = _LATE / 2 + np.arange(graph.num_ops, dtype=np.float64)
        tensor = np.where(own.sums >= 0, own.sums, own.tensor)
        found, _ = _once(problem, own, ops, tensor, priority, builder)
        own.sums = np.where(own.sums >= 0, own.sums, found)


def _once(
    problem: Problem,
    own: ReplicaCopy,
    ops: IntArray,
    tensor: IntArray,
    priority: FloatArray,
    builder: StepBuilder,
    num_sharing: int = 0,
) -> tuple[IntArray, IntArray]:
    """Add ops that run once per step.

    Returns the expanded tensor of each tensor that they make, and their expanded ops; -1 for all
    others.

    If the replica updates on the host, the ops run there, with memory bandwidth split among
    ``num_sharing`` devices; 0 keeps them on the device.
    """
    graph = problem.graph
    op_of = np.full(graph.num_ops, -1, dtype=np.int32)
    seconds = problem.costs.op_s[:, ops] / own.num_shards
    changed: dict[str, Any] = {}
    if own.replica.update == "host" and num_sharing > 0:
        seconds = host_update_s(problem, own, ops, num_sharing)
        changed = {"stream": Stream.HOST, "workspace_bytes": 0}
    op_of[ops] = builder.copy_ops(
        problem, ops, own.label, own.device_of, priority, seconds, **changed
    )
    made = _made(graph, op_of)
    found = np.full(graph.num_tensors, -1, dtype=np.int32)
    found[made] = _add_tensors(builder, graph, made, op_of, own.label, graph.tensor_role[made])
    known = np.where(found >= 0, found, tensor)
    aliased = made[graph.alias_of[made] >= 0]
    builder.set_alias(found[aliased], known[graph.alias_of[aliased]])
    _add_reads(builder, graph, op_of, known)
    return found, op_of


def _update(
    problem: Problem,
    own: ReplicaCopy,
    done: IntArray | None,
    num_sharing: int,
    builder: StepBuilder,
) -> None:
    """Add the optimizer ops of a replica, on device or host; they read summed gradients."""
    graph = problem.graph
    ops = np.flatnonzero(graph.op_phase == Phase.OPTIMIZER).astype(np.int32)
    if not len(ops):
        return
    sent: list[tuple[IntArray, int]] = []
    if own.replica.update == "host":
        done, sent = copies_out(problem, own, done, builder)
    priority = _LATE + np.arange(graph.num_ops, dtype=np.float64)
    tensor = np.where(own.sums >= 0, own.sums, own.tensor)
    _, op_of = _once(problem, own, ops, tensor, priority, builder, num_sharing)
    if done is not None:
        reader = op_of[graph.reader]
        waits = (reader >= 0) & (done[graph.reads] >= 0)
        builder.add_reads(reader[waits], done[graph.reads[waits]])
    copies_in(problem, own, sent, op_of, builder)
