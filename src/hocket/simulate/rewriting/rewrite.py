"""Carry a memory section into the graph: what is offloaded, fetched, recomputed, streamed, updated
on the host or done in chunks becomes ops.

Copies run on the copy streams of the device, updates at home on its host stream; so the simulator
times them, its memory curve proves the budget, and whoever executes the graph does just this. Each
stream runs its ops in the order of the rewritten graph. Tensors of the control role hold back what
would otherwise begin too early: a fetch begins when the block ``prefetch`` blocks before its reader
does, and a block waits for the copies out of the block that many before it. Every stall shows as
time of the step. O(ops + reads); Python for blocks and copies, numpy for ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, spans
from hocket.graph.graph import Graph, Phase, Stream
from hocket.plan.sections import Memory
from hocket.simulate.rewriting.blocks import blocks_of
from hocket.simulate.rewriting.chunks import Region, find_region
from hocket.simulate.rewriting.emit import Emitter
from hocket.simulate.rewriting.groups import GroupWriter
from hocket.simulate.rewriting.homes import (
    NUM_BERTHS,
    ParameterHomes,
    find_homes,
    num_parts,
)
from hocket.simulate.rewriting.needs import Uses, find_needs, find_uses
from hocket.simulate.rewriting.updates import Update


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A step that keeps a memory section, and what its ops were."""

    graph: Graph
    origin: IntArray
    """The op of the given graph that each op does, again or in part; -1 for copies."""
    share: FloatArray
    """The part of it that each op does: less than 1 in chunks."""
    moved_bytes: LongArray
    """What copies move."""
    beside: IntArray
    """An op of the given graph on whose device each op runs."""
    room_bytes: int
    """What lasts on the device for streamed parameters and visiting state to take turns in."""


def rewrite(graph: Graph, memory: Memory, uses: Uses | None = None) -> Rewritten:
    """The graph that carries out a memory section; ``uses`` saves finding them again."""
    uses = uses or find_uses(graph, blocks_of(graph, memory))
    return _Rewriter(graph, memory, uses).rewritten()


class _Rewriter:
    """Emits the ops of the rewritten step in order, and knows where each tensor is by then."""

    def __init__(self, graph: Graph, memory: Memory, uses: Uses) -> None:
        self.graph, self.memory, self.blocks = graph, memory, uses.blocks
        self.updates = uses.updates
        self.num_blocks, self.ahead = uses.blocks.num_blocks, memory.prefetch
        self.needs = find_needs(uses, memory)
        self.homes: ParameterHomes = find_homes(graph, memory, uses, self.needs.again)
        self.out = Emitter(graph)
        self.groups = GroupWriter(self.out, uses, self.homes)
        self.backward = self._backward_ops()
        self.fetches = self._fetches()
        self.leaving: dict[int, list[int]] = defaultdict(list)
        """Per block: storages of its forward pass that go to the host."""
        for storage, (made_by, _) in self.needs.offloaded.items():
            self.leaving[made_by].append(storage)
        self.done: dict[tuple[str, int], int] = {}
        """Control tensors of the last op of the forward or backward pass of a block."""
        self.sent: dict[tuple[str, int], list[int]] = defaultdict(list)
        """Control tensors of the copies out of a block's forward or backward pass."""
        self.brought: dict[tuple[str, int], list[int]] = {}
        """Streamed parameters that were fetched for a pass of a block that is not over."""
        self.offloads: dict[int, int] = {}
        """Storages to the control tensors of their offloads."""
        self.renewals: dict[int, int] = {}
        """Blocks to the control tensors of what the host has changed and the device keeps."""
        self.changed: list[int] = []
        """What tells that the last such block is changed."""
        self.gates: dict[int, list[int]] = {}
        """What the backward pass of a block waits for besides."""
        self.visitors: list[tuple[list[int], int]] = []
        """Pieces of state, and their blocks, that are still to come to the device."""
        self.room: dict[str, list[int]] = {}
        """What stands for the ``berths`` of state that comes to the device, for the ``slots`` of
        streamed parameters and for the ``ring`` of groups of experts."""
        self.berths: list[int] = []
        """Control tensors of the pieces of state that last went home after updates on the
        device."""
        self.region: Region | None = None
        if memory.loss_chunks > 1:
            self.region = find_region(graph, uses.blocks)
            reads = self.homes.streamed_reads
            reads["forward"][-1] = sorted({*reads["forward"][-1], *reads["backward"][-1]})
            reads["backward"][-1] = []

    def _backward_ops(self) -> list[LongArray]:
        ops = np.flatnonzero(self.graph.op_phase == Phase.BACKWARD)
        block = self.blocks.block_of[ops]
        by_block = np.argsort(block, kind="stable")
        edges = np.searchsorted(block[by_block], np.arange(1, self.num_blocks))
        return np.split(ops[by_block], edges)

    def _fetches(self) -> dict[int, list[int]]:
        """Per block: storages that are fetched for its backward pass, the last made first."""
        fetches: dict[int, list[int]] = defaultdict(list)
        for storage, (_, needed_by) in sorted(self.needs.offloaded.items(), reverse=True):
            fetches[needed_by].append(storage)
        return fetches

    def rewritten(self) -> Rewritten:
        self._add_persistent()
        last = self.num_blocks - 1
        top = last if self.region is None else last - 1
        """The last block that goes forward and backward by itself."""
        for block in range(self.ahead):
            self._fetch_parameters("forward", block)
        for block in range(top + 1):
            self._forward(block)
        for block in range(top, last - self.ahead, -1):
            self._fetch_backward(block)
        if self.region is not None:
            self._fetch_backward(last - self.ahead)
            self._in_chunks(last)
        for block in range(top, -1, -1):
            self._fetch_backward(block - self.ahead)
            # Behind what the next pass wants, because they wait for others to leave.
            self._update_visitors(len(self.visitors))
            self._backward(block)
        self._update_rest()
        columns = self.out.finished(f"{self.graph.name} within its budget")
        return Rewritten(*columns, self.homes.room_bytes)

    def _add_persistent(self) -> None:
        graph, homes = self.graph, self.homes
        there = np.flatnonzero(graph.tensor_producer < 0)
        # What lies in the memory of another tensor is where that one is.
        self.out.persistent(there[~homes.is_on_host[graph.root_of[there]]])
        for name, size in (("berths", homes.berths_bytes), ("slots", homes.slots_bytes),
                           ("ring", homes.ring_bytes)):  # fmt: skip
            self.room[name] = [self.out.lasting(name, size)] if size else []

    # ── the forward pass ─────────────────────────────────────────────────────────────────────────

    def _forward(self, block: int) -> None:
        self._fetch_parameters("forward", block + self.ahead)
        held_back = [*self.sent["forward", block - 1 - self.ahead], *self._renewal(block)]
        self._run("forward", block, np.arange(*self.blocks.start[block : block + 2]), held_back)
        self._drop_streamed(block)
        for storage in self.leaving[block]:
            self._offload(storage, block)

    def _run(self, phase: str, block: int, ops: LongArray, held_back: list[int]) -> None:
        """Emit a block's ops; the first waits for copies out, the last tells that all are done."""
        made = self._write(ops, also_reads=held_back, tells=True)
        if made is not None:
            self.done[phase, block] = made

    def _write(
        self, ops: LongArray, *, also_reads: Sequence[int], suffix: str = "",
        is_again: bool = False, tells: bool = False,
    ) -> int | None:  # fmt: skip
        """Ops one after the other, in groups where they are of experts that are streamed so."""
        if not self.homes.groups:
            return self.out.run(
                ops, suffix=suffix, is_again=is_again, also_reads=also_reads, tells=tells
            )
        told = None
        ops = self.groups.others(ops)
        for number, op in enumerate(ops.tolist()):
            how: dict[str, Any] = {"also_reads": () if number else also_reads, "suffix": suffix,
                                   "is_again": is_again}  # fmt: skip
            if self.groups.has(op):
                told = self.groups.write(op, room=self.room["ring"], **how)
            else:
                told = self.out.run([op], tells=tells and number == len(ops) - 1, **how)
        return told if tells else None

    def _offload(self, storage: int, block: int) -> None:
        """Copy out what a storage holds once all that the block writes into it is written."""
        size = int(self.graph.tensor_bytes[storage])
        told = self.out.copy(
            f"{self.graph.tensor_names[storage]}@offload", Stream.COPY_OUT, size,
            reads=[self.out.latest(storage)], beside=int(self.graph.tensor_producer[storage]),
            phase=Phase.FORWARD,
        )  # fmt: skip
        self.offloads[storage] = told
        self.sent["forward", block].append(told)

    # ── the backward pass ────────────────────────────────────────────────────────────────────────

    def _backward(self, block: int) -> None:
        again = self.groups.others(np.array(self.needs.again[block], dtype=np.int64))
        held_back = [*self.sent["backward", block + 1 + self.ahead], *self.gates.pop(block, ())]
        # Without the wait, a block whose input never left would be made again much too early.
        before = self.done.get(("backward", block + 1))
        waits = held_back + ([before] if before is not None else [])
        self._write(again, suffix="@again", is_again=True, also_reads=waits)
        self._run("backward", block, self.backward[block], [] if len(again) else held_back)
        self._update(block)
        self._drop_streamed(block)

    def _fetch_backward(self, block: int) -> None:
        """Bring parameters and activations for a block's backward pass, in the order of need."""
        if block < 0:
            return
        self._fetch_parameters("backward", block)
        for storage in self.fetches[block]:
            self.out.fetch(
                f"{self.graph.tensor_names[storage]}@fetch", [storage], self.graph.tensor_bytes,
                reads=[self.offloads[storage], *self._trigger("backward", block)],
                beside=int(self.graph.tensor_producer[storage]), phase=Phase.BACKWARD,
            )  # fmt: skip

    def _fetch_parameters(self, phase: str, block: int) -> None:
        if block >= self.num_blocks:
            return
        op = int(self.blocks.start[block])
        renewed = self.homes.renewed[block]
        if renewed and phase == "forward":
            size = int(self.homes.copied[renewed].sum())
            self.renewals[block] = self.out.copy(
                f"{self.blocks.names[block]}@renew", Stream.COPY_IN, size,
                reads=self._trigger(phase, block), beside=op, phase=Phase.FORWARD,
            )  # fmt: skip
        roots = self.homes.streamed_reads[phase][block]
        if not roots:
            return
        self.brought[phase, block] = roots
        self.out.fetch(
            f"{self.blocks.names[block]}@fetch-{phase}", roots, self.homes.copied,
            reads=[*self._trigger(phase, block), *self.room["slots"]], beside=op, is_held=False,
            phase=Phase.FORWARD if phase == "forward" else Phase.BACKWARD,
        )  # fmt: skip

    def _renewal(self, block: int) -> list[int]:
        """What tells that a block's parameters are those that the host has changed."""
        return [self.renewals[block]] if block in self.renewals else []

    def _trigger(self, phase: str, block: int) -> list[int]:
        """What tells that the pass ``prefetch`` passes before this one begins: the end of the one
        before that. Forward passes are counted up to the last, backward passes on from there."""
        last = self.num_blocks - 1
        # In chunks the last block's two passes are one.
        turn = last if self.region is not None else last + 1
        position = block if phase == "forward" else turn + last - block
        before = position - self.ahead - 1
        key = ("forward", before) if before <= last else ("backward", turn + last - before)
        told = self.done.get(key)
        return [] if told is None else [told]

    def _drop_streamed(self, block: int) -> None:
        """What was fetched for a pass goes with it, but for what a coming pass has fetched anew."""
        gone = {root for phase in ("forward", "backward")
                for root in self.brought.pop((phase, block), ())}  # fmt: skip
        self.out.forget(gone.difference(*self.brought.values()))

    # ── the loss in chunks ───────────────────────────────────────────────────────────────────────

    def _in_chunks(self, block: int) -> None:
        assert self.region is not None
        if not self.ahead:
            self._fetch_parameters("forward", block)
        ops = np.append(np.arange(*self.blocks.start[block : block + 2]), self.backward[block])
        count = self.memory.loss_chunks
        for chunk in range(count):
            told = self.out.chunk(
                ops, self.region, chunk, count, tells=chunk == count - 1,
                also_reads=() if chunk else self._renewal(block),
            )  # fmt: skip
            if told is not None:
                self.done["forward", block] = self.done["backward", block] = told
        self._update(block)
        self._drop_streamed(block)

    # ── the update ───────────────────────────────────────────────────────────────────────────────

    def _update(self, block: int) -> None:
        """Updates of the block's parameters, as soon as their gradients are there."""
        asked = self.homes.updates[block]
        has_all = self._have_gradients(np.array(asked, dtype=np.int64))
        ready = [op for op, is_ready in zip(asked, has_all, strict=True) if is_ready]
        self.homes.updates[block] = [op for op, is_ready in zip(asked, has_all, strict=True)
                                     if not is_ready]  # fmt: skip
        on_host = [op for op in ready if op in self.homes.host_updates]
        pieces = self.homes.visits.get(block, ())
        elsewhere = {*on_host, *(op for piece in pieces for op in piece)}
        self.out.run([op for op in ready if op not in elsewhere])
        if pieces and pieces[0][0] in ready:
            # Gradients of one such block wait beside the computation, until the next is over.
            self.gates[block - 1] = self.changed
        self.visitors += [(piece, block) for piece in pieces if piece[0] in set(ready)]
        self._update_visitors(NUM_BERTHS)
        if on_host:
            self._update_on_host([self.updates[op] for op in on_host], block)

    def _have_gradients(self, ops: LongArray) -> list[bool]:
        """Of each update, whether all that it reads is there or at home."""
        graph = self.graph
        at, reader = spans(graph.read_ptr, ops)
        reads = graph.reads[at]
        is_missing = ~(self.out.has(reads) | self.homes.is_on_host[graph.root_of[reads]])
        have: list[bool] = (np.bincount(reader[is_missing], minlength=len(ops)) == 0).tolist()
        return have

    def _at_home(self, op: int) -> list[int]:
        """What an update reads that is at home on the host."""
        reads = self.graph.reads_of(op)
        found: list[int] = reads[self.homes.is_on_host[self.graph.root_of[reads]]].tolist()
        return found

    def _update_rest(self) -> None:
        """What waited for gradients of other blocks, such as shared parameters."""
        for block in range(self.num_blocks - 1, -1, -1):
            self._update(block)
        self._update_visitors(len(self.visitors))

    def _update_visitors(self, most: int) -> None:
        """Updates of the next pieces of state that come to the device."""
        for piece, block in self.visitors[:most]:
            self._update_visitor(piece, block)
        del self.visitors[:most]

    def _update_visitor(self, ops: list[int], block: int) -> None:
        """State and parameters in full come in a piece, when an earlier one has left its berth, are
        changed beside the computation, and go home, rounded parameters with their twin. One large
        parameter goes in parts."""
        visiting = list(dict.fromkeys(t for op in ops for t in self._at_home(op)))
        count = num_parts([self.updates[op] for op in ops])
        for number in range(count):
            self._update_part(ops, block, visiting, number, count)

    def _update_part(
        self, ops: list[int], block: int, visiting: list[int], number: int, count: int
    ) -> None:
        graph, name = self.graph, self.graph.op_names[ops[0]]
        part = f":{number}" if count > 1 else ""
        told = self.done.get(("backward", block + 1))
        waits = self.room["berths"] + ([] if told is None else [told])
        waits += self._berth_left()
        here = self.out.fetch(
            f"{name}@fetch{part}", visiting, -(-graph.tensor_bytes // count), reads=waits,
            beside=ops[0], phase=Phase.OPTIMIZER, is_held=False,
        )  # fmt: skip
        changed = self.out.beside(ops, number, count)
        whole, copied = graph.tensor_bytes[visiting], self.homes.copied[visiting]
        size = int((whole + np.where(copied < whole, copied, 0)).sum())
        self.changed = changed[-1:]
        left = self.out.copy(
            f"{name}@return{part}", Stream.COPY_OUT, -(-size // count), reads=[*changed, *here],
            beside=ops[0],
        )  # fmt: skip
        self.berths = [*self.berths[1 - NUM_BERTHS :], left]
        self.out.forget(visiting)

    def _berth_left(self) -> list[int]:
        """What tells that there is room for another piece of state."""
        return self.berths[:1] if len(self.berths) == NUM_BERTHS else []

    def _update_on_host(self, updates: list[Update], block: int) -> None:
        name, ops = self.blocks.names[block], [u.op for u in updates]
        landed = {u.op: root for u in updates for root in u.roots if root in self.groups.landed}
        gradients = [tensor for u in updates if u.op not in landed for tensor in u.gradients]
        size = sum(u.sent_bytes for u in updates if u.op not in landed)
        count = len(self.sent["backward", block])
        label = f"{name}@gradients" + (f":{count}" if count else "")
        sent = [told for root in landed.values() for told in self.groups.landed[root]]
        if gradients:
            sent.append(self.out.copy(
                label, Stream.COPY_OUT, size, reads=self.out.now[gradients], beside=ops[0]
            ))  # fmt: skip
        self.sent["backward", block] += sent
        self.out.at_home(ops, sent, np.array([u.host_bytes for u in updates]))
