"""Apply a memory section to a graph: insert ops for offloads, fetches, recomputation, parameter
streaming, host updates and loss chunks.

Copies run on the copy streams of the device, host updates on its host stream. The simulator times
these ops, its memory curve proves the budget, and the runtime executes exactly this graph. Each
stream runs its ops in the order of the rewritten graph. Storages are held as the runtime holds
them: a storage that a module call offloads is freed when the second call after it begins. Memory
for a fetch is allocated when the call ``prefetch`` calls before its reader begins, however long the
copies take. Control tensors delay ops that would otherwise begin too early, so every stall shows in
the step time. O(ops + reads); Python for module calls and copies, numpy for ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, spans
from hocket.graph.graph import Graph, Phase, Stream
from hocket.plan.sections import Memory
from hocket.simulate.rewriting.blocks import blocks_of
from hocket.simulate.rewriting.casts import find_casts
from hocket.simulate.rewriting.chunks import Region, find_region
from hocket.simulate.rewriting.emit import Emitter
from hocket.simulate.rewriting.host_parameters import (
    NUM_STAGING_BUFFERS,
    HostParameters,
    find_host_parameters,
    num_parts,
)
from hocket.simulate.rewriting.module_calls import OUTSIDE
from hocket.simulate.rewriting.needs import NUM_LINGERING, find_needs, is_recomputed
from hocket.simulate.rewriting.nodes import Happening, PassTurn, find_turns
from hocket.simulate.rewriting.uses import Uses, find_uses

_HeldTensors = tuple[LongArray, list[int]]
"""Tensors that concurrent ops read, and the control tensors that signal the ends of these ops."""


class UpdateWriter:
    """Writes the updates of blocks as soon as their gradients are complete.

    A block is updated when the backward pass has left its module calls; its gradients are held
    until then. Updates on the device free them together. Gradients that are being copied to the
    host, or that a concurrent update reads, are freed when the gradients of the next block are
    ready. Parameters that belong to no single block are updated at the end of the step.
    """

    def __init__(
        self, uses: Uses, host: HostParameters, out: Emitter, done: dict[tuple[str, int], int],
        staging: list[int],
    ) -> None:  # fmt: skip
        """``done`` maps (pass, block) to the control tensor of the last op; ``staging`` are the
        staging buffers of swapped-in state, as tensors of the rewritten graph."""
        self._graph, self._names, self._updates = uses.graph, uses.blocks.names, uses.updates
        self._host, self._out, self._done, self._staging = host, out, done, staging
        self._pending: list[list[int]] = [list(ops) for ops in host.updates]
        """Per block: updates that are not written yet."""
        self._sent: _HeldTensors = np.zeros(0, dtype=np.int64), []
        """Gradients that are being copied to the host."""
        self._used: _HeldTensors = self._sent
        """Gradients that concurrent updates read."""
        self._state_swaps: list[tuple[list[int], int]] = []
        """Chunks of state that are not swapped in yet, with their blocks."""
        self._write_backs: list[int] = []
        """Control tensors of the last write-backs of state to the host."""
        self._changed: list[int] = []
        """Control tensor that signals the end of the last chunk's update."""

    def finish(self, block: int) -> None:
        """Write the updates of a block that the backward pass has left."""
        self._pending[block] = self._update(self._pending[block], block)

    def finish_step(self) -> None:
        """Write the remaining updates after the backward pass, and write swapped-in state back.

        These are updates of parameters that belong to no single block, or that waited for gradients
        of other blocks.
        """
        for block in reversed(range(len(self._pending))):
            self.finish(block)
        self._update(self._host.last_updates, 0, ":shared")
        self.swap_in()
        self._release(self._sent)
        self._release(self._used)

    def swap_in(self, most: int | None = None) -> None:
        """Swap in the next ``most`` chunks of optimizer state, by default all, and update them."""
        most = len(self._state_swaps) if most is None else most
        for piece, block in self._state_swaps[:most]:
            self._update_swapped(piece, block)
        del self._state_swaps[:most]

    def _update(self, ops: list[int], block: int, suffix: str = "") -> list[int]:
        """Write the updates whose gradients are complete; return the others."""
        ready = self._ready(ops)
        pieces = [piece for piece in self._host.state_swaps.get(block, ()) if piece[0] in ready]
        swapped = {op for piece in pieces for op in piece}
        on_host = [op for op in ops if op in ready and op in self._host.host_updates]
        here = [op for op in ops if op in ready.difference(on_host, swapped)]
        gradients = self._gradients(here)
        self._out.write(here)
        self._out.hold(gradients)
        if pieces:
            self._state_swaps += [(piece, block) for piece in pieces]
            gradients = self._gradients(swapped)
            self._release(self._used)
            self.swap_in(NUM_STAGING_BUFFERS)
            self._used = gradients, self._changed
        if on_host:
            self._update_on_host(on_host, f"{self._names[block]}@gradients{suffix}")
        return [op for op in ops if op not in ready]

    def _release(self, held: _HeldTensors) -> None:
        """Hold tensors that concurrent ops read, and let the next compute op wait for these ops."""
        tensors, signal = held
        self._out.hold(tensors)
        self._out.wait(signal)

    def _gradients(self, ops: Collection[int]) -> LongArray:
        """Return the gradients that updates read, as tensors of the rewritten graph."""
        found = [t for op in ops for t in self._updates[op].gradients]
        return self._out.now[np.array(found, dtype=np.int64)]

    def _ready(self, ops: list[int]) -> set[int]:
        """Return the updates whose inputs are all written already or host-resident."""
        graph, given = self._graph, np.array(ops, dtype=np.int64)
        at, reader = spans(graph.read_ptr, given)
        reads = graph.reads[at]
        is_here = (self._out.current(reads) >= 0) | self._host.is_on_host[graph.root_of[reads]]
        return set(ops).difference(given[reader[~is_here]].tolist())

    def _update_swapped(self, ops: list[int], block: int) -> None:
        """Update parameters on the device with swapped-in state.

        Copies state and full-precision parameters to the device once a staging buffer is free,
        updates them concurrently with compute, and writes them back with the low-precision copies
        of rounded parameters. A single large parameter is copied in parts.
        """
        graph, name = self._graph, self._graph.op_names[ops[0]]
        reads = np.concatenate([graph.reads_of(op) for op in ops])
        on_host = reads[self._host.is_on_host[graph.root_of[reads]]].tolist()
        swapped = list(dict.fromkeys(on_host))
        full, copied = graph.tensor_bytes[swapped], self._host.copied[swapped]
        size = int((full + np.where(copied < full, copied, 0)).sum())
        signal = self._done.get(("backward", block + 1))
        count = num_parts([self._updates[op] for op in ops])
        for number in range(count):
            part, suffix = (f":{number}", f"@{number}") if count > 1 else ("", "")
            waits = self._staging + ([] if signal is None else [signal])
            # A staging buffer is free when the write-back of an earlier chunk has finished.
            if len(self._write_backs) == NUM_STAGING_BUFFERS:
                waits = [*waits, self._write_backs.pop(0)]
            here = self._out.fetch(
                f"{name}@fetch{part}", swapped, -(-graph.tensor_bytes // count), reads=waits,
                neighbor=ops[0], phase=Phase.OPTIMIZER,
            )  # fmt: skip
            updates = self._out.write(ops, suffix=suffix, parts=count, stream=Stream.COPY_OUT)
            changed = self._out.signals(updates)
            self._changed = changed[-1:]
            self._write_backs.append(self._out.copy(
                f"{name}@return{part}", Stream.COPY_OUT, -(-size // count),
                reads=[*changed, *here], neighbor=ops[0],
            ))  # fmt: skip
            self._out.forget(swapped)

    def _update_on_host(self, ops: list[int], name: str) -> None:
        updates, sent = [self._updates[op] for op in ops], list[int]()
        leaving = self._gradients(ops)
        self._release(self._sent)
        if len(leaving):
            size = sum(update.sent_bytes for update in updates)
            sent.append(self._out.copy(
                name, Stream.COPY_OUT, size, reads=leaving.tolist(), neighbor=ops[0]
            ))  # fmt: skip
        self._sent = leaving, sent
        self._out.update_on_host(ops, sent, np.array([update.host_bytes for update in updates]))


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A step under a memory section, with the origin of each op."""

    graph: Graph
    origin: IntArray
    """Per op: the op of the given graph that it is, recomputes or is a part of; -1 for copies."""
    share: FloatArray
    """Per op: the fraction of its origin that it computes, less than 1 in chunks."""
    moved_bytes: LongArray
    """Per op: bytes that it copies, if it is a copy."""
    neighbor: IntArray
    """Per op: an op of the given graph that runs on the same device."""
    reserved_bytes: int
    """Device memory reserved as buffers for streamed parameters and swapped-in state."""

    @property
    def is_offload(self) -> BoolArray:
        """Per op: True if it offloads an activation; no other op of the forward pass copies to the
        host."""
        stream, phase = self.graph.op_stream, self.graph.op_phase
        return np.asarray((stream == Stream.COPY_OUT) & (phase == Phase.FORWARD))


def rewrite(graph: Graph, memory: Memory, uses: Uses | None = None) -> Rewritten:
    """Return the graph under a memory section; pass ``uses`` if they are known."""
    uses = uses or find_uses(graph, blocks_of(graph, memory))
    return _Rewriter(uses.graph, memory, uses).rewritten()


class _Rewriter:
    """Emits the ops of the rewritten step in order, and tracks where each tensor is."""

    def __init__(self, graph: Graph, memory: Memory, uses: Uses) -> None:
        self.graph, self.memory, self.uses, self.blocks = graph, memory, uses, uses.blocks
        self.calls = uses.module_calls.calls
        self.last, self.ahead = uses.blocks.num_blocks - 1, memory.prefetch
        self.recompute = is_recomputed(uses, memory)
        """Per module call: forward ops that its backward pass recomputes."""
        self.host: HostParameters = find_host_parameters(graph, memory, uses, self.recompute)
        is_whole = memory.loss_chunks == 1
        self.region: Region | None = None if is_whole else find_region(graph, uses.blocks)
        casts = find_casts(graph, self.host.rounded, uses.parameter_reads)
        # Chunks add up their gradients in the parameter's precision, and round the sum afterwards.
        chunked = frozenset[int]() if self.region is None else self.region.ops
        self.widened = [each for each in casts.widening if each.op in chunked]
        narrow = tuple(each for each in casts.widening if each.op not in chunked)
        casts = casts._replace(widening=narrow)
        self.needs = find_needs(uses, memory, casts.copies(graph))
        self.out = Emitter(graph, uses.nodes, casts)
        self.done: dict[tuple[str, int], int] = {}
        """(pass, block) mapped to the control tensor of its last op."""
        self.in_use: dict[tuple[str, int], list[int]] = {}
        """(pass, block) mapped to streamed parameters that were fetched for it, until the pass
        ends."""
        self.renewals: dict[int, int] = {}
        """Block mapped to the control tensor of the copy that brings resident parameters updated by
        the host."""
        self.offloads: dict[int, int] = {}
        """Storage mapped to the control tensor of its offload."""
        self.sending, self.leaving, self.coming = self._trips()
        self.module_call = OUTSIDE
        """The module call that the pass is in, or was in most recently."""
        self.unfetched = self.last
        """The last block whose parameters are not fetched for the backward pass yet."""
        self._add_persistent()
        staging = self._buffer("staging", self.host.staging_buffers_bytes)
        self.slots = self._buffer("slots", self.host.slots_bytes)
        """Reserved buffer for streamed parameters."""
        self.updates = UpdateWriter(uses, self.host, self.out, self.done, staging)
        if self.region is not None:
            reads = self.host.streamed_reads
            reads["backward"][-1] = sorted({*reads["forward"][-1], *reads["backward"][-1]})

    def _trips(self) -> tuple[dict[int, list[int]], ...]:
        """Group storages by the module call that offloads them, frees them or first needs them
        back, in reverse order of their production."""
        sending, leaving, coming = (defaultdict[int, list[int]](list) for _ in range(3))
        for storage, trip in sorted(self.needs.offloaded.items(), reverse=True):
            sending[trip.sent_by].append(storage)
            leaving[trip.needed_by + NUM_LINGERING].append(storage)
            coming[trip.needed_by].append(storage)
        return sending, leaving, coming

    def _add_persistent(self) -> None:
        before = np.flatnonzero(self.graph.tensor_producer < 0)
        # A view of a host-resident parameter is on the host, too.
        is_on_host = self.host.is_on_host[self.graph.root_of[before]]
        self.out.persistent(before[~is_on_host], self.host.sizes)

    def _buffer(self, name: str, size: int) -> list[int]:
        return [self.out.lasting(name, size)] if size else []

    def rewritten(self) -> Rewritten:
        for block in range(self.ahead):
            self._fetch_parameters("forward", block)
        for block in range(self.last + 1):
            self._forward(block)
        self.module_call = len(self.calls)
        self._prefetch_parameters(self.last + 1)
        for block in range(self.last, -1, -1):
            self._backward(block)
        self._leave()
        self.updates.finish_step()
        columns = self.out.finished(f"{self.graph.name} within its budget")
        return Rewritten(*columns, self.host.reserved_bytes)

    # ── the forward pass ─────────────────────────────────────────────────────────────────────────

    def _forward(self, block: int) -> None:
        self._fetch_parameters("forward", block + self.ahead)
        if block in self.renewals:
            self.out.wait([self.renewals[block]])
        at, stop = self.blocks.start[block : block + 2].tolist()
        region = self.region if block == self.last else None
        stop = stop if region is None else region.forward[0]
        for module_call in self.uses.block_calls[block]:
            if self.module_call in self.sending or module_call in self.leaving:
                start = min(self.calls[module_call].start, stop)
                self.out.write(np.arange(at, start))
                at = start
                self._send(self.module_call)
                self._free_offloaded(module_call)
            self.module_call = module_call
        self.out.write(np.arange(at, stop))
        if region is not None:
            for chunk in range(self.memory.loss_chunks):
                self._chunk(region, region.forward, chunk, is_recompute=False)
        self._send(self.module_call)
        self._end("forward", block)

    def _end(self, phase: str, block: int) -> None:
        """End a pass of a block."""
        for signal in self.out.last_signals():
            self.done[phase, block] = signal
        # Parameters fetched for the pass are freed, unless a later pass has fetched them again.
        gone = {root for each in ("forward", "backward")
                for root in self.in_use.pop((each, block), ())}  # fmt: skip
        self.out.forget(gone.difference(*self.in_use.values()))

    def _send(self, module_call: int) -> None:
        """Offload the storages of a finished module call, each as soon as it is complete."""
        for storage in sorted(self.sending.pop(module_call, ()), key=self.out.latest):
            self.offloads[storage] = self.out.copy(
                f"{self.graph.tensor_names[storage]}@offload", Stream.COPY_OUT,
                int(self.graph.tensor_bytes[storage]), reads=[self.out.latest(storage)],
                neighbor=int(self.graph.tensor_producer[storage]), phase=Phase.FORWARD,
            )  # fmt: skip

    def _free_offloaded(self, module_call: int) -> None:
        """Free the storages that were offloaded two calls before the module call that begins."""
        for storage in self.leaving.pop(module_call, ()):
            self.out.hold(np.array([self.out.latest(storage)]))
            self.out.wait([self.offloads[storage]])

    # ── the backward pass ────────────────────────────────────────────────────────────────────────

    def _backward(self, block: int) -> None:
        ops, turns, at = self.uses.backward[block], self.uses.turns[block], 0
        if block == self.last and self.region is not None:
            self._backward_chunks(self.region)
            ops = ops[~np.isin(ops, self.region.backward)]
            call_of, nodes = self.uses.module_calls.call_of, self.uses.nodes
            turns = find_turns(ops, call_of, nodes, self.uses.reads_saved, self.module_call)
        for turn in turns:
            if self._emits(turn):
                self.out.write(ops[at : turn.at])
                at = turn.at
                self._take(turn)
            elif turn.what == Happening.ENTERED:
                self.module_call = turn.module_call
        self.out.write(ops[at:])
        self._end("backward", block)

    def _emits(self, turn: PassTurn) -> bool:
        """Return True if an event of the backward pass emits ops or waits."""
        if turn.what != Happening.ENTERED:
            return bool(self.recompute[turn.module_call])
        is_first = self.calls[turn.module_call].block - self.ahead <= self.unfetched
        is_needed = any(reader >= turn.module_call - self.ahead for reader in self.coming)
        return is_first or is_needed or self.module_call in self.uses.last_calls

    def _take(self, turn: PassTurn) -> None:
        if turn.what == Happening.ENTERED:
            self._enter(turn.module_call)
        elif turn.what == Happening.ASKED:
            # Without this wait, a call whose input is still on the device would be recomputed far
            # too early.
            self.out.wait(self.out.last_signals())
            recompute = np.array(self.recompute[turn.module_call], dtype=np.int64)
            self.out.write(recompute, suffix="@recompute", is_recompute=True)
        else:
            # Inputs of a recomputation are held until all tensors that it saved were read.
            taken = np.array(self.needs.taken[turn.module_call], dtype=np.int64)
            self.out.hold(self.out.current(taken))

    def _enter(self, module_call: int) -> None:
        """Enter a module call of the backward pass, which has left all later calls."""
        self._leave()
        self.module_call = module_call
        self._prefetch_parameters(self.calls[module_call].block)
        for reader in [each for each in self.coming if each >= module_call - self.ahead]:
            self._fetch(self.coming.pop(reader))

    def _prefetch_parameters(self, block: int) -> None:
        """Fetch the parameters of the blocks before one whose backward pass begins."""
        while self.unfetched >= max(block - self.ahead, 0):
            self._fetch_parameters("backward", self.unfetched)
            self.unfetched -= 1
            # Swaps wait for write-backs, so they must not delay the fetches of the next pass.
            self.updates.swap_in()

    def _leave(self) -> None:
        """End a module call; update its block if it was the last call of the block."""
        if self.module_call in self.uses.last_calls:
            self.updates.finish(self.calls[self.module_call].block)

    def _fetch(self, storages: Sequence[int]) -> None:
        """Allocate memory for offloaded storages, and fetch them."""
        began, makers = self.out.last_signals(), self.graph.tensor_producer[storages].tolist()
        buffers = self.out.reserve(storages, makers[0])
        for storage, buffer, maker in zip(storages, buffers, makers, strict=True):
            self.out.fetch(
                f"{self.graph.tensor_names[storage]}@fetch", [storage], self.graph.tensor_bytes,
                reads=[self.offloads[storage], buffer, *began], buffer=buffer, neighbor=maker,
                phase=Phase.BACKWARD,
            )  # fmt: skip

    # ── parameters ───────────────────────────────────────────────────────────────────────────────

    def _fetch_parameters(self, phase: str, block: int) -> None:
        if not 0 <= block <= self.last:
            return
        op, name = int(self.blocks.start[block]), self.blocks.names[block]
        renewed = self.host.renewed[block]
        if renewed and phase == "forward":
            self.renewals[block] = self.out.copy(
                f"{name}@renew", Stream.COPY_IN, int(self.host.copied[renewed].sum()),
                reads=self._trigger(phase, block), neighbor=op, phase=Phase.FORWARD,
            )  # fmt: skip
        roots = self.host.streamed_reads[phase][block]
        if roots:
            self.in_use[phase, block] = roots
            self.out.fetch(
                f"{name}@fetch-{phase}", roots, self.host.copied, neighbor=op,
                reads=[*self._trigger(phase, block), *self.slots], phase=Phase[phase.upper()],
            )  # fmt: skip

    def _trigger(self, phase: str, block: int) -> list[int]:
        """Return control tensors that let a fetch start ``prefetch`` passes before the pass that
        needs it.

        They signal the end of the pass before that one. Backward passes are numbered on from the
        last forward pass.
        """
        position = block if phase == "forward" else 2 * self.last + 1 - block
        before = position - self.ahead - 1
        key = (
            ("forward", before) if before <= self.last else ("backward", 2 * self.last + 1 - before)
        )
        signal = self.done.get(key)
        return [] if signal is None else [signal]

    # ── the loss in chunks ───────────────────────────────────────────────────────────────────────

    def _backward_chunks(self, region: Region) -> None:
        """Recompute the forward pass of each chunk and run its backward pass at once."""
        module_call = int(self.uses.module_calls.call_of[region.forward[0]])
        if module_call != OUTSIDE:
            self._enter(module_call)
        for chunk in range(self.memory.loss_chunks):
            self._chunk(region, region.forward, chunk, is_recompute=True)
            self._chunk(region, region.backward, chunk, is_recompute=False)
        self.out.hold(self.out.current(region.rows))
        for op, gradient, narrow in self.widened:
            self.out.narrow(op, gradient, int(self.graph.tensor_bytes[narrow]))

    def _chunk(self, region: Region, ops: Sequence[int], chunk: int, *, is_recompute: bool) -> None:
        """Write one chunk of each op; ops independent of the batch run with the first chunk."""
        given = np.array(ops, dtype=np.int64)
        is_once = np.isin(given, list(region.once))
        if not chunk and not is_recompute:
            self.out.write(given[is_once])
        self.out.write(
            given[~is_once], suffix=f"@recompute{chunk}" if is_recompute else f"@{chunk}",
            is_recompute=is_recompute, parts=self.memory.loss_chunks,
            whole=() if is_recompute else region.whole, grows=chunk > 0,
        )  # fmt: skip
