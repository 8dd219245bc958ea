"""Costs of each block of a step: seconds, bytes saved for backward, bytes of working memory.

Computed from the costs of the problem and a walk over the step's storages. The activations that a
block saves have four policies (`ACTIVATION_POLICIES`), its parameters have four
(`PARAMETER_POLICIES`). Each has the bytes that stay on the device, the bytes that cross the link to
the host, and the seconds that it adds. The linear program chooses among them. O(ops + reads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.graph.graph import Graph, Phase
from hocket.hardware.host_route import HostRoute, host_route
from hocket.plan.problem import Problem
from hocket.plan.sections.memory import SMALLEST_MOVED
from hocket.simulate.rewriting.chunks import find_region
from hocket.simulate.rewriting.experts import all_in_groups, parts_of
from hocket.simulate.rewriting.host_parameters import num_parts, state_chunks
from hocket.simulate.rewriting.needs import NUM_LINGERING
from hocket.simulate.rewriting.updates import Update
from hocket.simulate.rewriting.uses import Uses

# Working memory of each pass of each block: all live bytes except what other blocks saved.
#
# A walk over the step in its order. A storage that the backward pass needs counts while the blocks
# that make it and read it run forward, and once more while blocks that need it run backward. In
# between it is a saved activation, for which the plan has a policy. O(ops + reads), Python.


@dataclass(frozen=True, eq=False)
class Work:
    """Most bytes per pass, and the bytes at each op before the updates."""

    forward: FloatArray
    backward: FloatArray
    held: FloatArray
    inner: FloatArray
    """Of these, bytes that exist for one chunk at a time if the last block runs in chunks."""
    tail: IntArray
    """Ops of the last block."""
    chunked: tuple[int, ...]
    """Forward ops that run twice if the loss is computed in chunks."""


def needed_last(uses: Uses, groups: Mapping[int, int]) -> dict[int, int]:
    """Per saved storage: the last block whose backward pass reads it, which runs backward first.
    Tensors made from one group of experts are not saved."""
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


ACTIVATION_POLICIES = ("kept", "offloaded", "recomputed", "recomputed from the host")
"""Policies of activations: "kept" are saved on the device."""
KEPT, OFFLOADED, RECOMPUTED, FROM_HOST = range(len(ACTIVATION_POLICIES))
PARAMETER_POLICIES = ("resident", "updated on the host", "streamed", "streamed with its state")
"""Policies of parameters. The last are updated on the device: optimizer state is swapped in."""
RESIDENT, HOST_UPDATE, STREAMED, STREAMED_STATE = range(len(PARAMETER_POLICIES))


@dataclass(frozen=True, eq=False, kw_only=True)
class ActivationNumbers:
    """Costs of the policies of activations, [block, policy]; sizes in bytes."""

    stay: FloatArray
    """Saved on the device until the backward pass."""
    moved: FloatArray
    """Offloaded to the host and fetched back."""
    recompute_s: FloatArray
    """Seconds of recomputed ops."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ParameterNumbers:
    """Costs of the policies of parameters, [block, policy]; sizes in bytes."""

    on_device: FloatArray
    """Parameters and optimizer state on the device at all times."""
    fetched: FloatArray
    """Parameters fetched for the backward pass."""
    fetched_at_once: FloatArray
    """Of these, bytes on the device at a time: one group of experts where they are in groups."""
    swapped_in: FloatArray
    """Optimizer state and full-precision parameters fetched for the update."""
    gradients: FloatArray
    """Gradients, or updated parameters and state, sent to the host."""
    last_piece: FloatArray
    """Of these, the last chunk where optimizer state is swapped in chunks."""
    leaving: FloatArray
    """Gradients on the device until they are sent or used."""
    brought: FloatArray
    """Parameters copied for the forward pass: streamed ones, and resident ones that the host has
    updated."""
    update_s: FloatArray
    """Seconds of updates on the device."""
    host_traffic: FloatArray
    """Host memory traffic of updates on the host."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockNumbers(ActivationNumbers, ParameterNumbers):
    """Per block, in the order of the forward pass; sizes in bytes, times in seconds."""

    forward_s: FloatArray
    backward_s: FloatArray
    forward_work: FloatArray
    """Peak of its forward pass, without the activations that other blocks saved."""
    backward_work: FloatArray
    """The same for its backward pass, with all its own saved activations on the device."""
    staging_buffers_bytes: float
    """Staging buffers on the device, needed if the state of any block is swapped in."""
    base_bytes: float
    """Bytes on the device under every plan: batch, buffers, parameters that no block reads."""
    tail_s: FloatArray
    """Seconds of each op of the last block."""
    tail_recompute_s: float
    """Seconds of ops that run twice if the loss is computed in chunks."""
    tail_held: FloatArray
    """Bytes held while each op of the last block runs, as in its work."""
    tail_inner: FloatArray
    """Of these, bytes that exist for one chunk at a time if the loss is computed in chunks."""
    launch_s: float
    link: HostRoute
    host_update_bps: float
    """Bytes that updates on the host read and write per second."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.forward_s)


def measure(
    problem: Problem, uses: Uses, device: int = 0, *, expert_groups: int = 1
) -> BlockNumbers:
    """The numbers of a step that runs on one device, streamed experts in about so many groups."""
    graph = uses.graph
    op_s = problem.costs.op_s[problem.costs.device_row[device]]
    groups = all_in_groups(uses.experts, expert_groups)
    parameters, staging_buffers_bytes = _parameter_numbers(uses, op_s, groups)
    work = find_work(uses, groups)
    return BlockNumbers(
        **vars(_activation_numbers(uses, op_s, groups)),
        **vars(parameters),
        forward_s=_by_block(uses, graph.op_phase == Phase.FORWARD, op_s),
        backward_s=_by_block(uses, graph.op_phase == Phase.BACKWARD, op_s),
        forward_work=work.forward,
        backward_work=work.backward,
        staging_buffers_bytes=staging_buffers_bytes,
        base_bytes=_base_bytes(uses),
        tail_s=op_s[work.tail],
        tail_recompute_s=float(op_s[list(work.chunked)].sum()),
        tail_held=work.held[work.tail],
        tail_inner=work.inner[work.tail],
        launch_s=problem.cluster.devices[device].kind.launch_s,
        link=host_route(problem.cluster, problem.cluster.devices[device]),
        host_update_bps=problem.cluster.host_update_bps,
    )


def _by_block(uses: Uses, chosen: BoolArray, values: FloatArray) -> FloatArray:
    sums = np.zeros(uses.blocks.num_blocks)
    np.add.at(sums, uses.blocks.block_of[chosen], values[chosen])
    return sums


# ── saved activations ────────────────────────────────────────────────────────────────────────────


def _activation_numbers(
    uses: Uses, op_s: FloatArray, groups: Mapping[int, int]
) -> ActivationNumbers:
    graph, count = uses.graph, uses.blocks.num_blocks
    stay, moved, recompute_s = (np.zeros((count, len(ACTIVATION_POLICIES))) for _ in range(3))
    last = needed_last(uses, groups)
    for block in range(count):
        own = {s for s in uses.needed[block] if last.get(s) == block}
        stay[block] = _bytes(graph, own)
        moved[block, OFFLOADED] = _bytes(graph, own & _movable(uses, block))
        stay[block, OFFLOADED] -= moved[block, OFFLOADED]
        recomputed = [op for call in uses.block_calls[block] for op in uses.recompute[call]]
        if not recomputed:
            # It cannot be recomputed: these policies cost the same as keeping it.
            continue
        taken, kept = _without(uses, block)
        here = {s for s in taken | kept if last.get(s, block) <= block}
        recompute_s[block, RECOMPUTED] = recompute_s[block, FROM_HOST] = op_s[recomputed].sum()
        stay[block, RECOMPUTED] = _bytes(graph, here)
        moved[block, FROM_HOST] = _bytes(graph, here - kept)
        stay[block, FROM_HOST] = stay[block, RECOMPUTED] - moved[block, FROM_HOST]
    return ActivationNumbers(stay=stay, moved=moved, recompute_s=recompute_s)


def _bytes(graph: Graph, storages: Iterable[int]) -> float:
    return float(graph.tensor_bytes[list(storages)].sum())


def _movable(uses: Uses, block: int) -> set[int]:
    """Storages of a block that can be offloaded: those that its module calls save."""
    there = range(len(uses.module_calls) - NUM_LINGERING)
    saved = {s for call in uses.block_calls[block] if call in there for s in uses.saved(call)}
    large = {s for s in saved if uses.graph.tensor_bytes[s] >= SMALLEST_MOVED}
    return large - uses.outside[block]


def _without(uses: Uses, block: int) -> tuple[set[int], set[int]]:
    """Storages that recomputing a block needs: inputs of its calls, and others that are kept."""
    taken: set[int] = set()
    kept = set(uses.outside[block])
    for call in uses.block_calls[block]:
        is_made = bool(uses.recompute[call])
        (taken if is_made else kept).update(uses.taken[call] if is_made else uses.saved(call))
    return taken, kept


# ── parameters ───────────────────────────────────────────────────────────────────────────────────


def _parameter_numbers(
    uses: Uses, op_s: FloatArray, groups: Mapping[int, int]
) -> tuple[ParameterNumbers, float]:
    """Costs of the parameters of each block, and bytes of the staging buffers for swapped state.
    Parameters that several blocks read stay on the device."""
    shape = (uses.blocks.num_blocks, len(PARAMETER_POLICIES))
    parameters = ParameterNumbers(
        **{each.name: np.zeros(shape) for each in fields(ParameterNumbers)}
    )
    _add_parameters(parameters, uses, groups)
    swapped_in: dict[int, list[Update]] = defaultdict(list)
    for update in uses.updates.values():
        _add_update(parameters, update, uses, op_s, groups)
        if not uses.is_shared(update):
            swapped_in[update.block].append(update)
    pieces, staging_buffers_bytes = state_chunks(swapped_in)
    for block, of_block in pieces.items():
        parts = sum(num_parts([uses.updates[op] for op in ops]) for ops in of_block)
        parameters.last_piece[block, STREAMED_STATE] = (
            parameters.gradients[block, STREAMED_STATE] / parts
        )
    return parameters, float(staging_buffers_bytes)


def _add_parameters(parameters: ParameterNumbers, uses: Uses, groups: Mapping[int, int]) -> None:
    for root, of in uses.readers.items():
        block, size = min(of), float(uses.graph.tensor_bytes[root])
        parameters.on_device[block] += size
        if root not in uses.shared:
            away, copied = (STREAMED, STREAMED_STATE), uses.copied_bytes[root]
            parameters.on_device[block, away] -= size
            parameters.fetched[block, away] += copied
            parameters.brought[block, away] += copied
            parameters.fetched_at_once[block, away] += copied / groups.get(root, 1)


def _add_update(
    parameters: ParameterNumbers,
    update: Update,
    uses: Uses,
    op_s: FloatArray,
    groups: Mapping[int, int],
) -> None:
    block, is_shared = update.block, uses.is_shared(update)
    parameters.on_device[block, RESIDENT] += update.state_bytes
    parameters.update_s[block, RESIDENT] += op_s[update.op]
    # Parameters that several blocks read stay on the device, and the host updates them.
    on_host = (HOST_UPDATE, STREAMED, STREAMED_STATE) if is_shared else (HOST_UPDATE, STREAMED)
    is_grouped = any(root in groups for root in update.roots)
    parameters.gradients[block, on_host] += (
        update.gradient_bytes if is_grouped else update.sent_bytes
    )
    at_once = max((groups.get(root, 1) for root in update.roots), default=1)
    parameters.leaving[block, on_host] += update.gradient_bytes / at_once
    parameters.host_traffic[block, on_host] += update.host_bytes
    back = on_host if is_shared else (HOST_UPDATE,)
    parameters.brought[block, back] += uses.copied_bytes[list(update.parameters)].sum()
    if not is_shared:
        parameters.swapped_in[block, STREAMED_STATE] += update.state_bytes + update.parameter_bytes
        parameters.gradients[block, STREAMED_STATE] += update.state_bytes + update.leaving_bytes
        parameters.leaving[block, STREAMED_STATE] += update.gradient_bytes


def _base_bytes(uses: Uses) -> float:
    graph = uses.graph
    there = (graph.tensor_producer < 0) & (graph.alias_of < 0)
    there[[*uses.readers, *(t for update in uses.updates.values() for t in update.state)]] = False
    return float(graph.tensor_bytes[there].sum())
