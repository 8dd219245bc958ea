"""Apply a memory section to the graph: offloads, fetches, recomputation, streaming, host updates
and chunks become ops.

Copies run on the copy streams of the device, host updates on its host stream. The simulator
therefore times them, its memory curve proves the budget, and the runtime executes exactly this
graph. Each stream runs its ops in the order of the rewritten graph. Storages are held as the
runtime holds them: what a module call offloads is freed when the second call after it begins, and
memory for a fetch is allocated when the call ``prefetch`` calls before its reader begins, however
long the copies take. Tensors of the control role delay ops that would otherwise begin too early.
Every stall shows as time of the step. O(ops + reads); Python for module calls and copies, numpy
for ops.
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
from hocket.simulate.rewriting.groups import GroupWriter
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
    """Writes updates of blocks as their gradients are whole."""

    def __init__(
        self, uses: Uses, host: HostParameters, groups: GroupWriter, out: Emitter,
        done: dict[tuple[str, int], int],
    ) -> None:  # fmt: skip
        """``done`` are control tensors of the last ops of the passes of blocks."""
        self._graph, self._names, self._updates = uses.graph, uses.blocks.names, uses.updates
        self._host, self._groups, self._out, self._done = host, groups, out, done
        self._asked: list[list[int]] = [list(ops) for ops in host.updates]
        """Per block: updates that are still to be made."""
        self.staging: list[int] = []
        """The staging buffers of swapped-in state, as tensors of the rewritten graph."""
        self._sent: tuple[LongArray, list[int]] = _NONE, []
        """Gradients that are being copied to the host, and the control tensors of these copies."""
        self._used: tuple[LongArray, list[int]] = _NONE, []
        """Likewise gradients that concurrent updates read."""
        self._state_swaps: list[tuple[list[int], int]] = []
        """Pieces of state, and their blocks, that are still to come to the device."""
        self._left: list[int] = []
        """Control tensors of the last write-backs of state to the host."""
        self._changed: list[int] = []
        """Control tensors: the last piece of a block has been updated."""

    def finish(self, block: int) -> None:
        """The backward pass has left a block."""
        self._asked[block] = self._update(self._asked[block], block)

    def finish_step(self) -> None:
        """The backward pass is over: update the parameters that belong to no single block, or that
        waited for gradients of other blocks, and write swapped-in state back."""
        for block in reversed(range(len(self._asked))):
            self.finish(block)
        self._update(self._host.last_updates, 0, "shared")
        self.module_call()
        self._give_up(self._sent)
        self._give_up(self._used)

    def _update(self, ops: list[int], block: int, how: str = "") -> list[int]:
        """Updates whose gradients are there; returns the others."""
        if not ops:
            return []
        has_all = self._have_gradients(np.array(ops))
        ready = {op for op, is_ready in zip(ops, has_all, strict=True) if is_ready}
        pieces = [piece for piece in self._host.state_swaps.get(block, ()) if piece[0] in ready]
        swapped = {op for piece in pieces for op in piece}
        on_host = [op for op in ops if op in ready and op in self._host.host_updates]
        here = [op for op in ops if op in ready.difference(on_host, swapped)]
        gradients = self._gradients(here)
        self._out.run(here)
        self._out.hold(gradients)
        if pieces:
            self._state_swaps += [(piece, block) for piece in pieces]
            gradients = self._gradients(swapped)
            self._give_up(self._used)
            self.module_call(NUM_STAGING_BUFFERS)
            self._used = gradients, self._changed
        if on_host:
            self._update_on_host(on_host, block, how)
        return [op for op in ops if op not in ready]

    def _give_up(self, lent: tuple[LongArray, list[int]]) -> None:
        """Free tensors that a concurrent op reads once that op is over."""
        tensors, signal = lent
        self._out.hold(tensors)
        self._out.wait(signal)

    def _gradients(self, ops: Sequence[int] | set[int]) -> LongArray:
        """The gradients that updates read, as tensors of the rewritten graph."""
        found = [t for op in ops for t in self._updates[op].gradients]
        return self._out.now[np.array(found, dtype=np.int64)]

    def _have_gradients(self, ops: LongArray) -> list[bool]:
        """Per update: True if all that it reads is on the device or host-resident."""
        graph = self._graph
        at, reader = spans(graph.read_ptr, ops)
        reads = graph.reads[at]
        is_missing = ~(self._out.has(reads) | self._host.is_on_host[graph.root_of[reads]])
        have: list[bool] = (np.bincount(reader[is_missing], minlength=len(ops)) == 0).tolist()
        return have

    # ── concurrent with compute ──────────────────────────────────────────────────────────────────

    def module_call(self, most: int | None = None) -> None:
        """Updates of the next pieces of state that come to the device, or of all."""
        most = len(self._state_swaps) if most is None else most
        for piece, block in self._state_swaps[:most]:
            self._update_swapped(piece, block)
        del self._state_swaps[:most]

    def _update_swapped(self, ops: list[int], block: int) -> None:
        """Copy state and full-precision parameters to the device once a staging buffer is free,
        update them concurrently with compute, and write them back, with the low-precision copies
        of rounded parameters. One large parameter goes in parts."""
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
        changed = self._out.beside(ops, number, count)
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
        """Host-resident tensors that an update reads."""
        reads = self._graph.reads_of(op)
        found: list[int] = reads[self._host.is_on_host[self._graph.root_of[reads]]].tolist()
        return found

    # ── on the host ──────────────────────────────────────────────────────────────────────────────

    def _update_on_host(self, ops: list[int], block: int, how: str) -> None:
        updates, landed = [self._updates[op] for op in ops], self._groups.landed
        whole = [u for u in updates if not any(root in landed for root in u.roots)]
        leaving = self._gradients([u.op for u in whole])
        sent = [signal for u in updates for root in u.roots for signal in landed.get(root, ())]
        self._give_up(self._sent)
        if len(leaving):
            sent.append(self._out.copy(
                f"{self._names[block]}@gradients" + (f":{how}" if how else ""), Stream.COPY_OUT,
                sum(u.sent_bytes for u in whole), reads=leaving.tolist(), beside=ops[0],
            ))  # fmt: skip
        self._sent = leaving, sent
        self._out.host_resident(ops, sent, np.array([u.host_bytes for u in updates]))


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A step that keeps a memory section, and what its ops were."""

    graph: Graph
    origin: IntArray
    """The op of the given graph that each op does, again or in part; -1 for copies."""
    share: FloatArray
    """The part of it that each op does: less than 1 in chunks."""
    moved_bytes: LongArray
    """Bytes that copies move."""
    beside: IntArray
    """An op of the given graph on whose device each op runs."""
    reserved_bytes: int
    """Device memory reserved as buffers for streamed parameters and swapped-in state."""

    @property
    def is_offload(self) -> BoolArray:
        """Per op: whether it sends an activation to the host, as nothing else of the forward pass
        does."""
        stream, phase = self.graph.op_stream, self.graph.op_phase
        return np.asarray((stream == Stream.COPY_OUT) & (phase == Phase.FORWARD))


def rewrite(graph: Graph, memory: Memory, uses: Uses | None = None) -> Rewritten:
    """The graph under a memory section; ``uses`` saves finding them again."""
    uses = uses or find_uses(graph, blocks_of(graph, memory))
    return _Rewriter(uses.graph, memory, uses).rewritten()


class _Rewriter:
    """Emits the ops of the rewritten step in order, and knows where each tensor is by then."""

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
        self.out = Emitter(graph, uses.nodes_beside(self.host.groups), casts)
        self.groups = GroupWriter(self.out, uses, self.host)
        self.done: dict[tuple[str, int], int] = {}
        """Control tensors of the last op of the forward or backward pass of a block."""
        self.brought: dict[tuple[str, int], list[int]] = {}
        """Streamed parameters that were fetched for a pass of a block that is not over."""
        self.renewals: dict[int, int] = {}
        """Blocks to the control tensors of what the host has changed and the device keeps."""
        self.offloads: dict[int, int] = {}
        """Storages to the control tensors of their offloads."""
        self.sending, self.leaving, self.coming = self._trips()
        self.module_call = OUTSIDE
        """The module call that the pass is in, or was in last."""
        self.unfetched = self.num_blocks - 1
        """The last block whose parameters were not fetched for the backward pass."""
        self.buffer: dict[str, list[int]] = {}
        """Reserved buffers: ``staging`` for swapped-in state, ``slots`` for streamed parameters,
        ``ring`` for groups of experts."""
        self.updates = UpdateWriter(uses, self.host, self.groups, self.out, self.done)
        if self.region is not None:
            reads = self.host.streamed_reads
            reads["backward"][-1] = sorted({*reads["forward"][-1], *reads["backward"][-1]})

    def _trips(self) -> tuple[dict[int, list[int]], ...]:
        """Storages by the module call that offloads them, by the call at whose start they are
        freed, and, the last made first, by the call whose backward pass first needs them."""
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
        columns = self.out.columns.finished(f"{self.graph.name} within its budget")
        return Rewritten(*columns, self.host.reserved_bytes)

    def _add_persistent(self) -> None:
        graph, host = self.graph, self.host
        there = np.flatnonzero(graph.tensor_producer < 0)
        # What lies in the memory of another tensor is where that one is.
        self.out.persistent(there[~host.is_on_host[graph.root_of[there]]], host.sizes)
        for name, size in (("staging", host.staging_buffers_bytes), ("slots", host.slots_bytes),
                           ("ring", host.ring_bytes)):  # fmt: skip
            self.buffer[name] = [self.out.lasting(name, size)] if size else []
        self.updates.staging = self.buffer["staging"]

    def _write(self, ops: LongArray, *, suffix: str = "", is_recompute: bool = False) -> None:
        """Ops one after the other, in groups where they are of experts that are streamed so."""
        if not self.host.groups:
            self.out.run(ops, suffix=suffix, is_recompute=is_recompute)
            return
        for op in self.groups.others(ops).tolist():
            if self.groups.has(op):
                self.groups.write(
                    op, buffer=self.buffer["ring"], suffix=suffix, is_recompute=is_recompute
                )
            else:
                self.out.run([op], suffix=suffix, is_recompute=is_recompute)

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
                self._write(np.arange(at, start))
                at = start
                self._send(self.module_call)
                self._let_go(module_call)
            self.module_call = module_call
        self._write(np.arange(at, stop))
        if block == self.num_blocks - 1 and self.region is not None:
            for chunk in range(self.memory.loss_chunks):
                self._chunk(self.region.forward, chunk, is_recompute=False)
        self._send(self.module_call)
        self._end("forward", block)

    def _end(self, phase: str, block: int) -> None:
        """A pass of a block is over."""
        for signal in self.out.last_signals():
            self.done[phase, block] = signal
        # What was fetched for it goes with it, but for what a coming pass has fetched anew.
        gone = {root for each in ("forward", "backward")
                for root in self.brought.pop((each, block), ())}  # fmt: skip
        self.out.forget(gone.difference(*self.brought.values()))

    def _send(self, module_call: int) -> None:
        """Offload the storages of a finished module call: each as soon as it is complete, while the
        call goes on."""
        for storage in sorted(self.sending.pop(module_call, ()), key=self.out.latest):
            size = int(self.graph.tensor_bytes[storage])
            self.offloads[storage] = self.out.copy(
                f"{self.graph.tensor_names[storage]}@offload", Stream.COPY_OUT, size,
                reads=[self.out.latest(storage)], beside=int(self.graph.tensor_producer[storage]),
                phase=Phase.FORWARD,
            )  # fmt: skip

    def _let_go(self, module_call: int) -> None:
        """Free earlier offloaded storages when a module call begins."""
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
                self._write(ops[at : turn.at])
                at = turn.at
                self._take(turn)
            elif turn.what == Happening.ENTERED:
                self.module_call = turn.module_call
        self._write(ops[at:])
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
        """True if anything is done at a turn of the backward pass."""
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
            self._write(recompute, suffix="@again", is_recompute=True)
        else:
            # Inputs of a module call's recomputation are held until all that it saved was read.
            taken = np.array(self.needs.taken[turn.module_call], dtype=np.int64)
            self.out.hold(self.out.standing(taken))

    def _enter(self, module_call: int) -> None:
        """The backward pass enters a module call, and has left all later ones."""
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
            # Behind what the next pass wants, because they wait for others to leave.
            self.updates.module_call()

    def _leave(self) -> None:
        """A module call is over; update its block where that was the block's last one."""
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
        self.brought[phase, block] = roots
        self.out.fetch(
            f"{self.blocks.names[block]}@fetch-{phase}", roots, self.host.copied,
            reads=[*self._trigger(phase, block), *self.buffer["slots"]], beside=op, is_held=False,
            phase=Phase.FORWARD if phase == "forward" else Phase.BACKWARD,
        )  # fmt: skip

    def _trigger(self, phase: str, block: int) -> list[int]:
        """Control tensors: the pass ``prefetch`` passes before this one begins, that is, the one
        before that ends. Forward passes are counted up to the last, backward ones on from there."""
        last = self.num_blocks - 1
        position = block if phase == "forward" else 2 * last + 1 - block
        before = position - self.ahead - 1
        key = ("forward", before) if before <= last else ("backward", 2 * last + 1 - before)
        signal = self.done.get(key)
        return [] if signal is None else [signal]

    # ── the loss in chunks ───────────────────────────────────────────────────────────────────────

    def _backward_chunks(self, region: Region) -> None:
        """Each chunk goes forward once more and backward at once."""
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
        assert self.region is not None
        self.out.chunk(ops, self.region, chunk, self.memory.loss_chunks, is_recompute=is_recompute)
