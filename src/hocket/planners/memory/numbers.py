"""Costs of each block of a step: seconds, bytes saved for backward, bytes of working memory.

They come from the costs of the problem and a walk over the step's storages. A block can treat the
activations that it saves in four ways (`ACTIVATION_POLICIES`), and its parameters in four ways
(`PARAMETER_POLICIES`). Each policy has bytes that stay on the device, bytes that are copied between
device and host, and seconds that it adds. The linear program chooses among them. O(ops + reads).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray
from hocket.graph.graph import Graph, Phase
from hocket.hardware.host_route import HostRoute, host_route
from hocket.plan.problem import Problem
from hocket.plan.sections.memory import SMALLEST_MOVED
from hocket.simulate.rewriting.chunks import find_region
from hocket.simulate.rewriting.host_parameters import num_parts, state_chunks
from hocket.simulate.rewriting.needs import NUM_LINGERING
from hocket.simulate.rewriting.updates import Update
from hocket.simulate.rewriting.uses import Uses

# Working memory of each pass of each block: all live bytes except what other blocks saved.
#
# A walk over the step in its order. A storage that the backward pass needs counts as working memory
# while the blocks that make it and read it run forward, and again while blocks that need it run
# backward. In between it is a saved activation, which has a policy. O(ops + reads), Python.


@dataclass(frozen=True, eq=False)
class Work:
    """Peak bytes of each block's passes, and the bytes held at each op before the updates."""

    forward: FloatArray
    backward: FloatArray
    held: FloatArray
    inner: FloatArray
    """[op]: part of ``held`` that exists for one chunk at a time if the loss is in chunks."""
    tail: IntArray
    """Ops of the last block."""
    chunked: tuple[int, ...]
    """Forward ops that run twice if the loss is computed in chunks."""


def needed_last(uses: Uses) -> dict[int, int]:
    """Per saved storage: the last block whose backward pass reads it, the first to run backward."""
    last: dict[int, int] = {}
    for block in range(uses.blocks.num_blocks):
        for storage in uses.needed[block]:
            last[storage] = block
    return last


def find_work(uses: Uses) -> Work:
    """Working memory of each block's forward and backward pass."""
    graph, blocks = uses.graph, uses.blocks
    num_forward = int(blocks.start[-1])
    num_step = int((graph.op_phase != Phase.OPTIMIZER).sum())
    region, last_block = find_region(graph, blocks), blocks.num_blocks - 1
    saved = needed_last(uses)
    stops = _last_reads(uses, num_step)
    block_of = blocks.block_of[:num_step]
    held, inner = np.zeros(num_step + 1), np.zeros(num_step + 1)
    backward_ends = _backward_ends(uses, num_step)
    producer, sizes = graph.tensor_producer, graph.held_bytes
    for storage in np.flatnonzero((producer >= 0) & (producer < num_step) & (sizes > 0)).tolist():
        start, size = int(producer[storage]), float(sizes[storage])
        spans = [(start, int(stops[storage]) + 1)]
        if storage in saved:
            # Working memory at least until the end of the forward pass of its last reading block.
            until = max(saved[storage], int(block_of[start]))
            spans = [(start, int(blocks.start[until + 1])), *backward_ends[storage]]
        is_inner = start in region.ops and storage not in region.whole
        for begin, end in spans:
            held[begin] += size
            held[end] -= size
            if is_inner:
                inner[begin] += size
                inner[end] -= size
    # Difference arrays: each span adds its bytes at the start and subtracts them after the end.
    at = np.cumsum(held)[:num_step] + graph.workspace_bytes[:num_step]
    count = blocks.num_blocks
    forward, backward = np.zeros(count), np.zeros(count)
    np.maximum.at(forward, block_of[:num_forward], at[:num_forward])
    np.maximum.at(backward, block_of[num_forward:], at[num_forward:])
    tail = np.flatnonzero(block_of == last_block).astype(np.int32)
    inner_at = np.cumsum(inner)[:num_step] + graph.workspace_bytes[:num_step]
    return Work(forward, backward, at, inner_at, tail, region.forward)


def _last_reads(uses: Uses, num_step: int) -> LongArray:
    """[storage]: the op after which the storage is free.

    A gradient is freed with its update, which follows the backward pass of the gradient's block.
    """
    graph, block_of = uses.graph, uses.blocks.block_of
    reader = graph.reader
    ends = np.zeros(uses.blocks.num_blocks, dtype=np.int64)
    np.maximum.at(ends, block_of[:num_step], np.arange(num_step))
    until = np.where(reader < num_step, reader, ends[block_of[reader]])
    last = np.maximum(graph.tensor_producer.astype(np.int64), -1)
    np.maximum.at(last, graph.root_of[graph.reads], until)
    # Held results that no op reads stay to the end of the step.
    keeps = graph.is_held & ~np.isin(np.arange(graph.num_tensors), graph.reads)
    last[graph.root_of[keeps]] = num_step - 1
    return np.minimum(last, num_step - 1)


def _backward_ends(uses: Uses, num_step: int) -> dict[int, list[tuple[int, int]]]:
    """Per saved storage: spans of backward ops during which it is on the device.

    There is one span per block that needs it, from the start of the block's backward pass to the
    storage's last reader there.
    """
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
"""Policies for saved activations; "kept" leaves them on the device."""
KEPT, OFFLOADED, RECOMPUTED, FROM_HOST = range(len(ACTIVATION_POLICIES))
PARAMETER_POLICIES = ("resident", "updated on the host", "streamed", "streamed with its state")
"""Policies for parameters. Under the last, optimizer state is swapped in and updated on the
device."""
RESIDENT, HOST_UPDATE, STREAMED, STREAMED_STATE = range(len(PARAMETER_POLICIES))


@dataclass(frozen=True, eq=False, kw_only=True)
class ActivationNumbers:
    """Costs of the activation policies, [block, policy]; sizes in bytes."""

    stay: FloatArray
    """Bytes saved on the device until the backward pass."""
    moved: FloatArray
    """Bytes offloaded to the host and fetched back."""
    recompute_s: FloatArray
    """Seconds of recomputed ops."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ParameterNumbers:
    """Costs of the parameter policies, [block, policy]; sizes in bytes."""

    on_device: FloatArray
    """Bytes of parameters and optimizer state that are always on the device."""
    fetched: FloatArray
    """Bytes of parameters fetched for the backward pass."""
    swapped_in: FloatArray
    """Bytes of optimizer state and full-precision parameters fetched for the update."""
    gradients: FloatArray
    """Bytes sent to the host: gradients, or updated parameters and state."""
    last_piece: FloatArray
    """Part of ``gradients`` in the last chunk if optimizer state is swapped in chunks."""
    leaving: FloatArray
    """Bytes of gradients on the device until they are sent or used."""
    brought: FloatArray
    """Bytes of parameters copied in for the forward pass: streamed ones, and resident ones that the
    host has updated."""
    update_s: FloatArray
    """Seconds of updates on the device."""
    host_traffic: FloatArray
    """Bytes of host memory read and written by updates on the host."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockNumbers(ActivationNumbers, ParameterNumbers):
    """Costs per block, in the order of the forward pass; sizes in bytes, times in seconds."""

    forward_s: FloatArray
    backward_s: FloatArray
    forward_work: FloatArray
    """Peak of each forward pass, without the activations that other blocks saved."""
    backward_work: FloatArray
    """Peak of each backward pass, with all saved activations of this block only."""
    staging_buffers_bytes: float
    """Bytes of staging buffers on the device, needed if the state of any block is swapped in."""
    base_bytes: float
    """Bytes on the device under every plan: batch, buffers, parameters that no block reads."""
    tail_s: FloatArray
    """Seconds of each op of the last block."""
    tail_recompute_s: float
    """Seconds of ops that run twice if the loss is computed in chunks."""
    tail_held: FloatArray
    """Bytes held while each op of the last block runs, without chunks."""
    tail_inner: FloatArray
    """Part of ``tail_held`` that exists for one chunk at a time if the loss is in chunks."""
    launch_s: float
    link: HostRoute
    host_update_bps: float
    """Bytes per second that updates on the host read and write."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return len(self.forward_s)


def measure(problem: Problem, uses: Uses, device: int = 0) -> BlockNumbers:
    """Compute the costs of the blocks of a step that runs on one device."""
    graph = uses.graph
    op_s = problem.costs.op_s[problem.costs.device_row[device]]
    parameters, staging_buffers_bytes = _parameter_numbers(uses, op_s)
    work = find_work(uses)
    return BlockNumbers(
        **vars(_activation_numbers(uses, op_s)),
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


def _activation_numbers(uses: Uses, op_s: FloatArray) -> ActivationNumbers:
    graph, count = uses.graph, uses.blocks.num_blocks
    stay, moved, recompute_s = (np.zeros((count, len(ACTIVATION_POLICIES))) for _ in range(3))
    last = needed_last(uses)
    for block in range(count):
        # A storage that several blocks need is counted once, in the last of them.
        own = {s for s in uses.needed[block] if last.get(s) == block}
        stay[block] = _bytes(graph, own)
        moved[block, OFFLOADED] = _bytes(graph, own & _movable(uses, block))
        stay[block, OFFLOADED] -= moved[block, OFFLOADED]
        recomputed = [op for call in uses.block_calls[block] for op in uses.recompute[call]]
        if not recomputed:
            # Without recompute, these policies cost the same as saving the activations.
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
    # Tensors of the last calls would be freed only after the backward pass has begun.
    there = range(len(uses.module_calls) - NUM_LINGERING)
    saved = {s for call in uses.block_calls[block] if call in there for s in uses.saved(call)}
    large = {s for s in saved if uses.graph.tensor_bytes[s] >= SMALLEST_MOVED}
    return large - uses.outside[block]


def _without(uses: Uses, block: int) -> tuple[set[int], set[int]]:
    """Storages that recomputing a block reads: inputs of its calls, and other kept ones."""
    taken: set[int] = set()
    kept = set(uses.outside[block])
    for call in uses.block_calls[block]:
        is_made = bool(uses.recompute[call])
        (taken if is_made else kept).update(uses.taken[call] if is_made else uses.saved(call))
    return taken, kept


# ── parameters ───────────────────────────────────────────────────────────────────────────────────


def _parameter_numbers(uses: Uses, op_s: FloatArray) -> tuple[ParameterNumbers, float]:
    """Costs of each block's parameters, and bytes of the staging buffers for swapped state.

    Parameters that several blocks read stay on the device.
    """
    shape = (uses.blocks.num_blocks, len(PARAMETER_POLICIES))
    parameters = ParameterNumbers(
        **{each.name: np.zeros(shape) for each in fields(ParameterNumbers)}
    )
    _add_parameters(parameters, uses)
    swapped_in: dict[int, list[Update]] = defaultdict(list)
    for update in uses.updates.values():
        _add_update(parameters, update, uses, op_s)
        if not uses.is_shared(update):
            swapped_in[update.block].append(update)
    pieces, staging_buffers_bytes = state_chunks(swapped_in)
    for block, of_block in pieces.items():
        parts = sum(num_parts([uses.updates[op] for op in ops]) for ops in of_block)
        parameters.last_piece[block, STREAMED_STATE] = (
            parameters.gradients[block, STREAMED_STATE] / parts
        )
    return parameters, float(staging_buffers_bytes)


def _add_parameters(parameters: ParameterNumbers, uses: Uses) -> None:
    for root, of in uses.readers.items():
        # The first reading block pays for a parameter that several blocks read.
        block, size = min(of), float(uses.graph.tensor_bytes[root])
        parameters.on_device[block] += size
        if root not in uses.shared:
            away, copied = (STREAMED, STREAMED_STATE), uses.copied_bytes[root]
            parameters.on_device[block, away] -= size
            parameters.fetched[block, away] += copied
            parameters.brought[block, away] += copied


def _add_update(parameters: ParameterNumbers, update: Update, uses: Uses, op_s: FloatArray) -> None:
    block, is_shared = update.block, uses.is_shared(update)
    parameters.on_device[block, RESIDENT] += update.state_bytes
    parameters.update_s[block, RESIDENT] += op_s[update.op]
    # Parameters that several blocks read stay on the device, and the host updates them.
    on_host = (HOST_UPDATE, STREAMED, STREAMED_STATE) if is_shared else (HOST_UPDATE, STREAMED)
    parameters.gradients[block, on_host] += update.sent_bytes
    parameters.leaving[block, on_host] += update.gradient_bytes
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
    # What blocks read and what updates own is counted by the policies.
    there[[*uses.readers, *(t for update in uses.updates.values() for t in update.state)]] = False
    return float(graph.tensor_bytes[there].sum())
