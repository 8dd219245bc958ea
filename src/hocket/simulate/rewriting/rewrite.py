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
from collections.abc import Sequence
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

# The updates of a rewritten step: where the optimizer changes the parameters of each block.
#
# A block is updated when the backward pass has left its module calls, and its gradients are held
# until then. On the device they are freed together. Gradients that are being copied to the host, or
# that a concurrent update reads, are freed when the next block's are ready. Parameters that belong
# to no single block are updated at the end of the step. O(ops + reads).

_NONE: LongArray = np.zeros(0, dtype=np.int64)


class UpdateWriter:
    """Writes the updates of blocks as soon as their gradients are complete."""

    def __init__(
        self, uses: Uses, host: HostParameters, out: Emitter,
        done: dict[tuple[str, int], int],
    ) -> None:  # fmt: skip
        """``done`` maps (pass, block) to the control tensor of the last op."""
        self._graph, self._names, self._updates = uses.graph, uses.blocks.names, uses.updates
        self._host, self._out, self._done = host, out, done
        self._pending: list[list[int]] = [list(ops) for ops in host.updates]
        """Per block: updates that are not written yet."""
        self.staging: list[int] = []
        """Staging buffers of swapped-in state, as tensors of the rewritten graph."""
        self._sent: tuple[LongArray, list[int]] = _NONE, []
        """Gradients that are being copied to the host, and the control tensors of these copies."""
        self._used: tuple[LongArray, list[int]] = _NONE, []
        """Gradients that concurrent updates read, and the control tensors of these updates."""
        self._state_swaps: list[tuple[list[int], int]] = []
        """Chunks of state that are not swapped in yet, with their blocks."""
        self._left: list[int] = []
        """Control tensors of the last write-backs of state to the host."""
        self._changed: list[int] = []
        """Control tensors that signal that the last chunk of a block is updated."""

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
        self._update(self._host.last_updates, 0, "shared")
        self.module_call()
        self._release(self._sent)
        self._release(self._used)

    def _update(self, ops: list[int], block: int, how: str = "") -> list[int]:
        """Write those updates whose gradients are complete; return the others."""
        if not ops:
            return []
        has_all = self._have_gradients(np.array(ops))
        ready = {op for op, is_ready in zip(ops, has_all, strict=True) if is_ready}
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
            self.module_call(NUM_STAGING_BUFFERS)
            self._used = gradients, self._changed
        if on_host:
            self._update_on_host(on_host, block, how)
        return [op for op in ops if op not in ready]

    def _release(self, held: tuple[LongArray, list[int]]) -> None:
        """Hold tensors that concurrent ops read, and let the next compute op wait for these ops."""
        tensors, signal = held
        self._out.hold(tensors)
        self._out.wait(signal)

    def _gradients(self, ops: Sequence[int] | set[int]) -> LongArray:
        """The gradients that updates read, as tensors of the rewritten graph."""
        found = [t for op in ops for t in self._updates[op].gradients]
        return self._out.now[np.array(found, dtype=np.int64)]

    def _have_gradients(self, ops: LongArray) -> list[bool]:
        """Per update: True if all of its inputs are written already or host-resident."""
        graph = self._graph
        at, reader = spans(graph.read_ptr, ops)
        reads = graph.reads[at]
        is_missing = ~(self._out.has(reads) | self._host.is_on_host[graph.root_of[reads]])
        have: list[bool] = (np.bincount(reader[is_missing], minlength=len(ops)) == 0).tolist()
        return have

    # ── concurrent with compute ──────────────────────────────────────────────────────────────────

    def module_call(self, most: int | None = None) -> None:
        """Swap in the next ``most`` chunks of optimizer state, by default all, and update them."""
        most = len(self._state_swaps) if most is None else most
        for piece, block in self._state_swaps[:most]:
            self._update_swapped(piece, block)
        del self._state_swaps[:most]

    def _update_swapped(self, ops: list[int], block: int) -> None:
        """Update parameters on the device with swapped-in state.

        Copies state and full-precision parameters to the device once a staging buffer is free,
        updates them concurrently with compute, and writes them back with the low-precision copies
        of rounded parameters. A single large parameter is copied in parts.
        """
        swapped = list(dict.fromkeys(t for op in ops for t in self._on_host(op)))
        count = num_parts([self._updates[op] for op in ops])
        for number in range(count):
            self._update_part(ops, block, swapped, number, count)

    def _update_part(
        self, ops: list[int], block: int, swapped: list[int], number: int, count: int
    ) -> None:
        graph, name = self._graph, self._graph.op_names[ops[0]]
        part = f":{number}" if count > 1 else ""
        signal = self._done.get(("backward", block + 1))
        waits = self.staging + ([] if signal is None else [signal])
        # A staging buffer is free when the write-back of an earlier piece has finished.
        waits += self._left[:1] if len(self._left) == NUM_STAGING_BUFFERS else []
        here = self._out.fetch(
            f"{name}@fetch{part}", swapped, -(-graph.tensor_bytes // count), reads=waits,
            beside=ops[0], phase=Phase.OPTIMIZER, is_held=False,
        )  # fmt: skip
        suffix = f"@{number}" if count > 1 else ""
        updates = self._out.write(ops, suffix=suffix, parts=count, stream=Stream.COPY_OUT)
        changed = self._out.signals(updates)
        whole, copied = graph.tensor_bytes[swapped], self._host.copied[swapped]
        size = int((whole + np.where(copied < whole, copied, 0)).sum())
        self._changed = changed[-1:]
        left = self._out.copy(
            f"{name}@return{part}", Stream.COPY_OUT, -(-size // count), reads=[*changed, *here],
            beside=ops[0],
        )  # fmt: skip
        self._left = [*self._left[1 - NUM_STAGING_BUFFERS :], left]
        self._out.forget(swapped)

    def _on_host(self, op: int) -> list[int]:
        """Return the host-resident tensors that an update reads."""
        reads = self._graph.reads_of(op)
        found: list[int] = reads[self._host.is_on_host[self._graph.root_of[reads]]].tolist()
        return found

    # ── on the host ──────────────────────────────────────────────────────────────────────────────

    def _update_on_host(self, ops: list[int], block: int, how: str) -> None:
        updates, sent = [self._updates[op] for op in ops], list[int]()
        leaving = self._gradients(ops)
        self._release(self._sent)
        if len(leaving):
            sent.append(self._out.copy(
                f"{self._names[block]}@gradients" + (f":{how}" if how else ""), Stream.COPY_OUT,
                sum(u.sent_bytes for u in updates), reads=leaving.tolist(), beside=ops[0],
            ))  # fmt: skip
        self._sent = leaving, sent
        self._out.update_on_host(ops, sent, np.array([u.host_bytes for u in updates]))


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
    beside: IntArray
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
        self.num_blocks, self.ahead = uses.blocks.num_blocks, memory.prefetch
        self.recompute = is_recomputed(uses, memory)
        """Per module call: forward ops that its backward pass recomputes."""
        self.host: HostParameters = find_host_parameters(graph, memory, uses, self.recompute)
        is_whole = memory.loss_chunks == 1
        self.region: Region | None = None if is_whole else find_region(graph, uses.blocks)
        casts = find_casts(graph, self.host.rounded, uses.parameter_reads)
        # Gradients of chunks are added up as wide as their parameters are, and rounded then.
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
        self.unfetched = self.num_blocks - 1
        """The last block whose parameters are not fetched for the backward pass yet."""
        self.buffer: dict[str, list[int]] = {}
        """Reserved buffers: ``staging`` for swapped-in state, ``slots`` for streamed parameters."""
        self.updates = UpdateWriter(uses, self.host, self.out, self.done)
        if self.region is not None:
            reads = self.host.streamed_reads
            reads["backward"][-1] = sorted({*reads["forward"][-1], *reads["backward"][-1]})

    def _trips(self) -> tuple[dict[int, list[int]], ...]:
        """Group storages by module call: the call that offloads them, frees them or first needs
        them back.

        Storages that are needed back are in reverse order of their production.
        """
        sending, leaving, coming = (defaultdict[int, list[int]](list) for _ in range(3))
        for storage, trip in sorted(self.needs.offloaded.items(), reverse=True):
            sending[trip.sent_by].append(storage)
            leaving[trip.needed_by + NUM_LINGERING].append(storage)
            coming[trip.needed_by].append(storage)
        return sending, leaving, coming

    def rewritten(self) -> Rewritten:
        self._add_persistent()
        last = self.num_blocks - 1
        for block in range(self.ahead):
            self._fetch_parameters("forward", block)
        for block in range(last + 1):
            self._forward(block)
        self.module_call = len(self.uses.module_calls)
        self._look_back(last + 1)
        for block in range(last, -1, -1):
            self._backward(block)
        self._leave()
        self.updates.finish_step()
        columns = self.out.finished(f"{self.graph.name} within its budget")
        return Rewritten(*columns, self.host.reserved_bytes)

    def _add_persistent(self) -> None:
        graph, host = self.graph, self.host
        there = np.flatnonzero(graph.tensor_producer < 0)
        # What lies in the memory of another tensor is where that one is.
        self.out.persistent(there[~host.is_on_host[graph.root_of[there]]], host.sizes)
        for name, size in (("staging", host.staging_buffers_bytes), ("slots", host.slots_bytes)):
            self.buffer[name] = [self.out.lasting(name, size)] if size else []
        self.updates.staging = self.buffer["staging"]

    # ── the forward pass ─────────────────────────────────────────────────────────────────────────

    def _forward(self, block: int) -> None:
        self._fetch_parameters("forward", block + self.ahead)
        if block in self.renewals:
            self.out.wait([self.renewals[block]])
        at, stop = self.blocks.start[block : block + 2].tolist()
        if block == self.num_blocks - 1 and self.region is not None:
            stop = self.region.forward[0]
        for module_call in self.uses.block_calls[block]:
            if self.module_call in self.sending or module_call in self.leaving:
                start = min(self.uses.module_calls.calls[module_call].start, stop)
                self.out.write(np.arange(at, start))
                at = start
                self._send(self.module_call)
                self._free_offloaded(module_call)
            self.module_call = module_call
        self.out.write(np.arange(at, stop))
        if block == self.num_blocks - 1 and self.region is not None:
            for chunk in range(self.memory.loss_chunks):
                self._chunk(self.region.forward, chunk, is_recompute=False)
        self._send(self.module_call)
        self._end("forward", block)

    def _end(self, phase: str, block: int) -> None:
        """End a pass of a block."""
        for signal in self.out.last_signals():
            self.done[phase, block] = signal
        # Parameters fetched for the pass are freed, unless a later pass has fetched them anew.
        gone = {root for each in ("forward", "backward")
                for root in self.in_use.pop((each, block), ())}  # fmt: skip
        self.out.forget(gone.difference(*self.in_use.values()))

    def _send(self, module_call: int) -> None:
        """Offload the storages of a finished module call, each as soon as it is complete."""
        for storage in sorted(self.sending.pop(module_call, ()), key=self.out.latest):
            size = int(self.graph.tensor_bytes[storage])
            self.offloads[storage] = self.out.copy(
                f"{self.graph.tensor_names[storage]}@offload", Stream.COPY_OUT, size,
                reads=[self.out.latest(storage)], beside=int(self.graph.tensor_producer[storage]),
                phase=Phase.FORWARD,
            )  # fmt: skip

    def _free_offloaded(self, module_call: int) -> None:
        """Free the storages that were offloaded two calls before the module call that begins."""
        for storage in self.leaving.pop(module_call, ()):
            self.out.hold(np.array([self.out.latest(storage)]))
            self.out.wait([self.offloads[storage]])

    # ── the backward pass ────────────────────────────────────────────────────────────────────────

    def _backward(self, block: int) -> None:
        ops = self.uses.backward[block]
        if block == self.num_blocks - 1 and self.region is not None:
            self._backward_chunks(self.region)
            ops = ops[~np.isin(ops, self.region.backward)]
        at = 0
        for turn in self._turns(block, ops):
            if self._changes_something(turn):
                self.out.write(ops[at : turn.at])
                at = turn.at
                self._take(turn)
            elif turn.what == Happening.ENTERED:
                self.module_call = turn.module_call
        self.out.write(ops[at:])
        self._end("backward", block)

    def _turns(self, block: int, ops: LongArray) -> list[PassTurn]:
        if len(ops) == len(self.uses.backward[block]):
            return self.uses.turns[block]
        return find_turns(
            ops,
            self.uses.module_calls.call_of,
            self.uses.nodes,
            self.uses.reads_saved,
            self.module_call,
        )

    def _changes_something(self, turn: PassTurn) -> bool:
        """True if ops must be written at an event of the backward pass."""
        if turn.what != Happening.ENTERED:
            return bool(self.recompute[turn.module_call])
        is_first = (
            self.uses.module_calls.calls[turn.module_call].block - self.ahead <= self.unfetched
        )
        has_come = any(reader >= turn.module_call - self.ahead for reader in self.coming)
        return is_first or has_come or self.module_call in self.uses.last_calls

    def _take(self, turn: PassTurn) -> None:
        if turn.what == Happening.ENTERED:
            self._enter(turn.module_call)
        elif turn.what == Happening.ASKED:
            # Without the wait, a call whose input never left could be recomputed much too early.
            self.out.wait(self.out.last_signals())
            recompute = np.array(self.recompute[turn.module_call], dtype=np.int64)
            self.out.write(recompute, suffix="@again", is_recompute=True)
        else:
            # Inputs of a module call's recomputation are held until all that it saved was read.
            taken = np.array(self.needs.taken[turn.module_call], dtype=np.int64)
            self.out.hold(self.out.standing(taken))

    def _enter(self, module_call: int) -> None:
        """Enter a module call of the backward pass, which has left all later calls."""
        self._leave()
        self.module_call = module_call
        self._look_back(self.uses.module_calls.calls[module_call].block)
        for reader in [each for each in self.coming if each >= module_call - self.ahead]:
            self._fetch(self.coming.pop(reader))

    def _look_back(self, block: int) -> None:
        """Prefetch the parameters of the blocks before one whose backward pass begins."""
        while self.unfetched >= max(block - self.ahead, 0):
            self._fetch_parameters("backward", self.unfetched)
            self.unfetched -= 1
            # After the fetches of the next pass, because these wait for write-backs.
            self.updates.module_call()

    def _leave(self) -> None:
        """End a module call; update its block if it was the last call of the block."""
        if self.module_call in self.uses.last_calls:
            self.updates.finish(self.uses.module_calls.calls[self.module_call].block)

    def _fetch(self, storages: Sequence[int]) -> None:
        """Allocate memory for offloaded storages, and fetch them."""
        began = self.out.last_signals()
        buffers = self.out.reserve(storages, int(self.graph.tensor_producer[storages[0]]))
        for storage, buffer in zip(storages, buffers, strict=True):
            self.out.fetch(
                f"{self.graph.tensor_names[storage]}@fetch", [storage], self.graph.tensor_bytes,
                reads=[self.offloads[storage], buffer, *began], buffer=buffer,
                beside=int(self.graph.tensor_producer[storage]), phase=Phase.BACKWARD,
            )  # fmt: skip

    # ── parameters ───────────────────────────────────────────────────────────────────────────────

    def _fetch_parameters(self, phase: str, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            return
        op = int(self.blocks.start[block])
        renewed = self.host.renewed[block]
        if renewed and phase == "forward":
            size = int(self.host.copied[renewed].sum())
            self.renewals[block] = self.out.copy(
                f"{self.blocks.names[block]}@renew", Stream.COPY_IN, size,
                reads=self._trigger(phase, block), beside=op, phase=Phase.FORWARD,
            )  # fmt: skip
        roots = self.host.streamed_reads[phase][block]
        if not roots:
            return
        self.in_use[phase, block] = roots
        self.out.fetch(
            f"{self.blocks.names[block]}@fetch-{phase}", roots, self.host.copied,
            reads=[*self._trigger(phase, block), *self.buffer["slots"]], beside=op, is_held=False,
            phase=Phase.FORWARD if phase == "forward" else Phase.BACKWARD,
        )  # fmt: skip

    def _trigger(self, phase: str, block: int) -> list[int]:
        """Return control tensors that let a fetch start ``prefetch`` passes before the pass that
        needs it.

        They signal the end of the pass before that one. Backward passes are numbered on from the
        last forward pass.
        """
        last = self.num_blocks - 1
        position = block if phase == "forward" else 2 * last + 1 - block
        before = position - self.ahead - 1
        key = ("forward", before) if before <= last else ("backward", 2 * last + 1 - before)
        signal = self.done.get(key)
        return [] if signal is None else [signal]

    # ── the loss in chunks ───────────────────────────────────────────────────────────────────────

    def _backward_chunks(self, region: Region) -> None:
        """Recompute the forward pass of each chunk and run its backward pass at once."""
        module_call = int(self.uses.module_calls.call_of[region.forward[0]])
        if module_call != OUTSIDE:
            self._enter(module_call)
        for chunk in range(self.memory.loss_chunks):
            self._chunk(region.forward, chunk, is_recompute=True)
            self._chunk(region.backward, chunk, is_recompute=False)
        self.out.hold(self.out.standing(region.rows))
        for op, gradient, narrow in self.widened:
            self.out.narrow(op, gradient, int(self.graph.tensor_bytes[narrow]))

    def _chunk(self, ops: Sequence[int], chunk: int, *, is_recompute: bool) -> None:
        """Write one chunk of each op; ops independent of the batch run with the first chunk."""
        assert self.region is not None
        given = np.array(ops, dtype=np.int64)
        is_once = np.isin(given, list(self.region.once))
        if not chunk and not is_recompute:
            self.out.write(given[is_once])
        self.out.write(
            given[~is_once], suffix=f"@again{chunk}" if is_recompute else f"@{chunk}",
            is_recompute=is_recompute, parts=self.memory.loss_chunks,
            whole=() if is_recompute else self.region.whole, grows=chunk > 0, with_addends=True,
        )  # fmt: skip
