"""Emitter of the rewrite: writes the rewritten graph in batches of ops and tracks tensor versions.

It writes ops of the given graph (in full, recomputed or in parts), copies to and from the host, and
ops that only allocate memory. A tensor is identified by its number in the given graph. Its current
version is its first output, a recomputed one, or a fetched copy of its storage. Consecutive ops are
written together, as columns, because searches rewrite a step for every plan that they try. O(ops +
reads), numpy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hocket.base.arrays import BoolArray, FloatArray, IntArray, LongArray, pointers, spans
from hocket.graph.build import Interned, OpColumns, TensorColumns, assemble
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role, Stream
from hocket.simulate.rewriting.casts import CAST, Casts, without_casts

if TYPE_CHECKING:
    from hocket.simulate.rewriting.nodes import BackwardNodes

_COPIES = {int(Stream.COPY_IN): "copy.in", int(Stream.COPY_OUT): "copy.out",
           int(Stream.COMPUTE): "reserve"}  # fmt: skip
"""Op kinds that the given graph does not have, by the streams on which they run."""


class WrittenOps(NamedTuple):
    """Columns of ops that were written together; other columns follow from their origins."""

    origin: LongArray
    """Ops of the given graph; -1 for copies."""
    beside: LongArray
    """Ops of the given graph, on whose devices the written ops run."""
    num_parts: LongArray
    """Number of parts into which the given op is split; 0 for ops that only allocate memory."""
    is_recompute: BoolArray
    phase: LongArray
    stream: LongArray
    num_bytes: LongArray
    """Bytes that each op reads and writes, or copies."""
    partner: LongArray
    num_reads: LongArray
    reads: LongArray
    """Tensors that the ops read, op by op."""


class WrittenTensors(NamedTuple):
    """Columns of tensors that were written together."""

    num_bytes: LongArray
    producer: LongArray
    role: LongArray
    alias_of: LongArray


class _LastRun(NamedTuple):
    """The compute ops that were written together most recently."""

    run: int
    """Their position in the list of written columns."""
    op: int
    """The last of these ops."""
    first_made: int
    """The first tensor that these ops made."""
    producer: LongArray
    """Producer of each tensor that these ops made."""


class Emitter:
    """Columns of the rewritten graph, and the current version of each tensor of the given graph."""

    def __init__(self, graph: Graph, nodes: BackwardNodes, casts: Casts) -> None:
        """``casts`` take neither time nor memory."""
        self.graph, self._nodes = without_casts(graph, casts), nodes
        self._is_done: BoolArray = ~np.isin(np.arange(graph.num_ops), casts.ops)
        self._holds: BoolArray = np.diff(nodes.held_ptr) > 0
        self._op_names: list[str] = []
        self._tensor_names: list[str] = []
        self._ops: list[WrittenOps] = []
        self._tensors: list[WrittenTensors] = []
        self._ends: dict[int, int] = {}
        """Written ops, mapped to the control tensors that signal their ends."""
        self.now: LongArray = np.full(graph.num_tensors, -1)
        """Per tensor: its current version in the rewritten graph; -1 for none."""
        self._fetched: LongArray = np.full(graph.num_tensors, -1)
        """Per storage: its fetched copy; -1 for none."""
        self._latest: LongArray = np.full(graph.num_tensors, -1)
        """Per storage: the last tensor that was written in it; -1 for none."""
        self._number: LongArray = np.zeros(graph.num_tensors, dtype=np.int64)
        """Per tensor: its number of versions, which distinguishes their names."""
        self._made_by: LongArray = np.full(graph.num_ops, -1)
        """Per op: the first op written for it."""
        self._waiting: list[int] = []
        """Control tensors that the next compute op waits for."""
        self._last = _LastRun(-1, -1, 0, np.zeros(0, dtype=np.int64))
        self._is_persistent: BoolArray = np.isin(np.arange(len(Role)), PERSISTENT_ROLES)
        self._role: LongArray = graph.tensor_role.astype(np.int64)
        # The update of a gradient follows at once, and nothing else reads it.
        updating = graph.reads[graph.op_phase[graph.reader] == Phase.OPTIMIZER]
        passing = graph.root_of[updating[self._role[updating] == Role.GRADIENT]]
        is_passing = np.isin(graph.root_of, passing) & (self._role == Role.GRADIENT)
        self._role[is_passing] = Role.ACTIVATION

    # ── current versions of tensors ──────────────────────────────────────────────────────────────

    def has(self, tensors: IntArray) -> BoolArray:
        """True for each tensor that has a version in the rewritten graph."""
        return self.standing(tensors) >= 0

    def standing(self, tensors: IntArray | LongArray) -> LongArray:
        """Return the current versions of tensors in the rewritten graph; -1 for none."""
        fetched = self._fetched[self.graph.root_of[tensors]]
        return np.where(fetched >= 0, fetched, self.now[tensors])

    def latest(self, storage: int) -> int:
        """The last tensor that was made in a storage."""
        return int(self._latest[storage])

    def forget(self, storages: Iterable[int]) -> None:
        """Drop the fetched copies of these storages."""
        self._fetched[self.graph.root_of[list(storages)]] = -1

    # ── begins and ends ──────────────────────────────────────────────────────────────────────────

    def wait(self, signals: Iterable[int]) -> None:
        """Let the next compute op wait for these control tensors."""
        self._waiting += signals

    def hold(self, tensors: LongArray) -> None:
        """Hold tensors until the last written compute op ends."""
        last = self._last
        if last.op < 0 or not len(tensors):
            return
        own = tensors - last.first_made
        made_by = np.append(last.producer, last.op)[np.clip(own, 0, len(last.producer))]
        is_before = (tensors >= 0) & ((own < 0) | (made_by < last.op))
        self._read_more(tensors[is_before])

    def _read_more(self, tensors: LongArray) -> None:
        """Let the last written compute op read more tensors."""
        columns = self._ops[self._last.run]
        columns.num_reads[-1] += len(tensors)
        self._ops[self._last.run] = columns._replace(reads=np.append(columns.reads, tensors))

    def last_signals(self) -> list[int]:
        """Return the control tensor that signals the last compute op's end; empty before it."""
        return self.signals([self._last.op]) if self._last.op >= 0 else []

    def signals(self, ops: Iterable[int]) -> list[int]:
        """Return control tensors that signal the ends of written ops."""
        ops = list(ops)
        new = [op for op in ops if op not in self._ends]
        if not new:
            return [self._ends[op] for op in ops]
        nothing = np.zeros(len(new), dtype=np.int64)
        made = self._add_tensors(
            [f"{self._op_names[op]}@end" for op in new], nothing, np.array(new, dtype=np.int64),
            nothing + int(Role.CONTROL), nothing - 1,
        )  # fmt: skip
        self._ends.update(zip(new, made.tolist(), strict=True))
        return [self._ends[op] for op in ops]

    # ── ops of the graph ─────────────────────────────────────────────────────────────────────────

    def write(
        self, ops: Sequence[int] | LongArray, *, suffix: str = "", is_recompute: bool = False,
        parts: int = 1, whole: Collection[int] = (), grows: bool = False,
        with_addends: bool = False, stream: Stream | None = None,
    ) -> list[int]:  # fmt: skip
        """Write ops of the graph one after another, each in full or one of its ``parts``; return
        them.

        Storages in ``whole`` are allocated in full by the first part, and later parts, which
        ``grows`` marks, add to them. Of other storages each part makes its own. ``with_addends``
        holds the values that a part adds until the last of these ops ends. Without a ``stream`` the
        ops run on their own.
        """
        graph, ops = self.graph, np.asarray(ops, dtype=np.int64)
        if not len(ops):
            return []
        made, maker = spans(graph.made_ptr, ops)
        if is_recompute:
            is_new = ~self._is_persistent[self._role[made]]
            made, maker = made[is_new], maker[is_new]
            # A later module call may have fetched it as its input, and has used it.
            self._fetched[made[graph.root_of[made] == made]] = -1
        producer, owners = len(self._op_names) + maker, list(whole)
        is_grown = np.isin(made, owners) & grows
        grown = self.now[made[is_grown]]
        divisor = np.where(np.isin(graph.root_of[made], owners), 1, parts)
        self._make(made, producer, -(-graph.tensor_bytes[made] // divisor), is_grown, grown)
        # No caller keeps the inputs of recomputed ops.
        reads, num_reads = self._reads_now(ops, with_held=not is_recompute or parts > 1)
        reads = np.insert(reads, np.cumsum(num_reads)[maker[is_grown]], grown)
        num_reads = num_reads + np.bincount(maker[is_grown], minlength=len(ops))
        written = self._like(
            ops, suffix, reads, num_reads, producer, parts=parts, is_recompute=is_recompute,
            stream=stream,
        )  # fmt: skip
        if with_addends:
            is_added = np.isin(made, owners) & (graph.alias_of[made] < 0)
            is_added &= graph.op_phase[ops[maker]] == Phase.BACKWARD
            self._hold_addends(made[is_added], producer[is_added], parts)
        return written

    def update_on_host(
        self, ops: Sequence[int], after: Sequence[int], num_bytes: LongArray
    ) -> None:
        """Write host updates, which start after copies, with their host memory traffic."""
        self._like(
            np.array(ops), "", np.tile(after, len(ops)), np.full(len(ops), len(after)),
            np.zeros(0, dtype=np.int64), stream=Stream.HOST, num_bytes=num_bytes,
        )  # fmt: skip

    def narrow(self, op: int, tensor: int, num_bytes: int) -> None:
        """Replace the result of an op by a version rounded to ``num_bytes``."""
        wide, producer = self.standing(np.array([tensor])), np.array([len(self._op_names)])
        self._make(np.array([tensor]), producer, np.array([num_bytes]))
        self._like(np.array([op]), "@narrow", wide, np.array([1]), producer)

    def _hold_addends(self, tensors: LongArray, producer: LongArray, parts: int) -> None:
        """Hold the values that a part adds to full tensors until the last written op ends.

        Each part's value for a parameter gradient has the full size, in the dtype in which it is
        computed.
        """
        graph = self.graph
        is_gradient = graph.tensor_role[tensors] == Role.GRADIENT
        makers = graph.tensor_producer[tensors].tolist()
        computed = [int(graph.reads_of(op)[0]) if graph.kind_of(op) == CAST else tensor
                    for op, tensor in zip(makers, tensors.tolist(), strict=True)]  # fmt: skip
        sizes = graph.tensor_bytes[computed] // np.where(is_gradient, 1, parts)
        names = [f"{graph.tensor_names[t]}@part{p}"
                 for t, p in zip(tensors.tolist(), producer.tolist(), strict=True)]  # fmt: skip
        added = self._add_activations(names, sizes, producer)
        self._read_more(added[producer < self._last.op])

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    def copy(
        self, name: str, stream: Stream, num_bytes: int, *, reads: Iterable[int], beside: int,
        phase: Phase = Phase.BACKWARD,
    ) -> int:  # fmt: skip
        """Write a copy to or from the host; return the control tensor that signals its end."""
        return self.signals([self._add_op(name, stream, num_bytes, reads, beside, phase)])[0]

    def reserve(self, tensors: Sequence[int], beside: int) -> list[int]:
        """Allocate memory, on the compute stream, for tensors that will be fetched into it."""
        waits, self._waiting = self._waiting, []
        names, new = self.graph.tensor_names, len(self._op_names)
        name = f"{names[tensors[0]]}@reserve:{new}"
        self._add_op(name, Stream.COMPUTE, 0, waits, beside, Phase.BACKWARD, parts=0)
        producer = np.full(len(tensors), new)
        self._last = _LastRun(len(self._ops) - 1, new, len(self._tensor_names), producer)
        made: list[int] = self._add_activations(
            [f"{names[t]}@reserve:{new}" for t in tensors], self.graph.tensor_bytes[[*tensors]],
            producer,
        ).tolist()  # fmt: skip
        return made

    def fetch(
        self, name: str, tensors: Sequence[int], sizes: LongArray, *, reads: Iterable[int],
        beside: int, phase: Phase, buffer: int = -1, is_held: bool = True,
    ) -> list[int]:  # fmt: skip
        """Write a copy from the host, which replaces the storages of these tensors; return the new
        tensors.

        ``sizes`` are bytes by tensor number. The copies take memory of their own unless they are in
        a reserved buffer (not ``is_held``) or in ``buffer``.
        """
        given = np.array(tensors, dtype=np.int64)
        moved = int(sizes[given].sum())
        new = self._add_op(name, Stream.COPY_IN, moved, reads, beside, phase)
        # Parameters of one storage, such as those of a layer of cuDNN, come in one.
        roots = np.array(list(dict.fromkeys(self.graph.root_of[given].tolist())), dtype=np.int64)
        self._fetched[roots] = self._add_activations(
            self._names(roots), sizes[roots] * is_held, np.full(len(roots), new), buffer
        )
        found: list[int] = self._fetched[roots].tolist()
        return found

    # ── tensors that exist before the step ───────────────────────────────────────────────────────

    def persistent(self, tensors: LongArray, sizes: LongArray) -> None:
        """Add tensors that exist before the step; ``sizes`` are bytes by tensor number."""
        self._make(tensors, np.full(len(tensors), -1), sizes[tensors])

    def lasting(self, name: str, num_bytes: int) -> int:
        """Reserve device memory for the whole step; return its tensor."""
        columns = (np.array([value]) for value in (num_bytes, -1, int(Role.BUFFER), -1))
        return int(self._add_tensors([name], *columns)[0])

    # ── columns ──────────────────────────────────────────────────────────────────────────────────

    def _make(
        self, tensors: LongArray, producer: LongArray, num_bytes: LongArray,
        is_grown: BoolArray | None = None, grown: LongArray | None = None,
    ) -> None:  # fmt: skip
        """Add new versions of tensors; those in ``grown`` add to existing storages."""
        graph, role = self.graph, self._role[tensors]
        # First, because aliases may be of tensors that are made here.
        new = len(self._tensor_names) + np.arange(len(tensors))
        self.now[tensors] = new
        base = graph.alias_of[tensors]
        is_alias = base >= 0
        alias_of = np.where(is_alias, self.standing(np.maximum(base, 0)), -1)
        # What changes a fetched parameter is freed with it.
        is_brought = is_alias & (self._fetched[graph.root_of[np.maximum(base, 0)]] >= 0)
        if is_grown is not None:
            alias_of[is_grown], is_brought = grown, is_brought & ~is_grown
        role = np.where(is_brought & self._is_persistent[role], int(Role.ACTIVATION), role)
        self._add_tensors(self._names(tensors), num_bytes, producer, role, alias_of)
        # Of several tensors in one storage the last one stays.
        self._latest[graph.root_of[tensors]] = new

    def _reads_now(self, ops: LongArray, *, with_held: bool) -> tuple[LongArray, LongArray]:
        """Return current versions of tensors that ops read or hold, and their number per op."""
        at, reader = spans(self.graph.read_ptr, ops)
        read = self.standing(self.graph.reads[at])
        num_reads = np.bincount(reader, minlength=len(ops))
        if not with_held or not self._holds[ops].any():
            return read, num_reads
        at, holder = spans(self._nodes.held_ptr, ops)
        held = self.standing(self._nodes.held[at])
        # A tensor that is made in groups has no version of the whole.
        holder, held = holder[held >= 0], held[held >= 0]
        reads = np.insert(read, pointers(num_reads)[holder + 1], held)
        return reads, num_reads + np.bincount(holder, minlength=len(ops))

    def _like(
        self, ops: LongArray, suffix: str, reads: LongArray, num_reads: LongArray,
        producer: LongArray, *, parts: int = 1, is_recompute: bool = False,
        stream: Stream | None = None, num_bytes: LongArray | None = None,
    ) -> list[int]:  # fmt: skip
        """Write copies of ops of the graph, or parts of them.

        ``producer`` are the producers of the tensors that were added for these ops just before.
        """
        graph, first = self.graph, len(self._op_names)
        new = first + np.arange(len(ops))
        if stream is None:
            reads = np.append(np.array(self._waiting, dtype=np.int64), reads)
            num_reads[0] += len(self._waiting)
            first_made = len(self._tensor_names) - len(producer)
            self._last = _LastRun(len(self._ops), int(new[-1]), first_made, producer)
            self._waiting = []
        names = graph.op_names
        self._op_names += [names[op] + suffix for op in ops.tolist()]
        phase, partner = graph.op_phase[ops].astype(np.int64), graph.partner[ops]
        is_new = self._made_by[ops] < 0
        self._made_by[ops[is_new]] = new[is_new]
        streams = graph.op_stream[ops].astype(np.int64)
        streams = streams if stream is None else np.full(len(ops), int(stream))
        self._ops.append(WrittenOps(
            origin=ops, beside=ops, num_parts=parts * self._is_done[ops],
            is_recompute=np.full(len(ops), is_recompute),
            phase=np.where(is_recompute & (phase == Phase.FORWARD), int(Phase.BACKWARD), phase),
            stream=streams,
            num_bytes=graph.bytes_touched[ops] // parts if num_bytes is None else num_bytes,
            partner=np.where(partner >= 0, self._made_by[np.maximum(partner, 0)], -1),
            num_reads=num_reads, reads=reads,
        ))  # fmt: skip
        return new.tolist()

    def _add_op(
        self, name: str, stream: Stream, num_bytes: int, reads: Iterable[int], beside: int,
        phase: Phase, parts: int = 1,
    ) -> int:  # fmt: skip
        """Write an op that the given graph does not have."""
        read = np.array(list(reads), dtype=np.int64)
        one = (-1, beside, parts, False, int(phase), int(stream), num_bytes, -1, len(read))
        self._ops.append(WrittenOps(*[*(np.array([value]) for value in one), read]))
        self._op_names.append(name)
        return len(self._op_names) - 1

    def _add_activations(
        self, names: list[str], num_bytes: LongArray, producer: LongArray, alias_of: int = -1
    ) -> LongArray:
        role = np.full(len(names), int(Role.ACTIVATION))
        return self._add_tensors(names, num_bytes, producer, role, np.full(len(names), alias_of))

    def _add_tensors(
        self, names: list[str], num_bytes: LongArray, producer: LongArray, role: LongArray,
        alias_of: LongArray,
    ) -> LongArray:  # fmt: skip
        """Add tensors and return their numbers."""
        first = len(self._tensor_names)
        self._tensor_names += names
        self._tensors.append(WrittenTensors(num_bytes, producer, role, alias_of))
        return first + np.arange(len(names))

    def _names(self, tensors: LongArray) -> list[str]:
        """Names of new versions of tensors."""
        names, number = self.graph.tensor_names, self._number[tensors]
        self._number[tensors] = number + 1
        given = zip(tensors.tolist(), number.tolist(), strict=True)
        return [f"{names[t]}@{n}" if n else names[t] for t, n in given]

    # ── the graph ────────────────────────────────────────────────────────────────────────────────

    def finished(self, name: str) -> tuple[Graph, IntArray, FloatArray, LongArray, IntArray]:
        """Return the rewritten graph, and the other columns of `Rewritten`."""
        ops = WrittenOps(*map(np.concatenate, zip(*self._ops, strict=True)))
        tensors = WrittenTensors(*map(np.concatenate, zip(*self._tensors, strict=True)))
        is_copy = ops.origin < 0
        graph = assemble(
            name, self._op_columns(ops, is_copy), TensorColumns(self._tensor_names, *tensors),
            pointers(ops.num_reads), ops.reads, meta=self.graph.meta,
        )  # fmt: skip
        moved = np.where(is_copy, ops.num_bytes, 0)
        origin, beside = ops.origin.astype(np.int32), ops.beside.astype(np.int32)
        share = np.where(ops.num_parts > 0, 1.0 / np.maximum(ops.num_parts, 1), 0.0)
        return graph, origin, share, moved, beside

    def _op_columns(self, ops: WrittenOps, is_copy: BoolArray) -> OpColumns:
        given, source = self.graph, np.maximum(ops.origin, 0)
        count = np.maximum(ops.num_parts, 1)
        kinds = tuple(dict.fromkeys((*given.kinds, *_COPIES.values())))
        kind = given.op_kind[source].copy()
        for stream, name in _COPIES.items():
            kind[is_copy & (ops.stream == stream)] = kinds.index(name)
        # Ops that draw random numbers again, or in parts, draw the same ones.
        is_again = is_copy | ops.is_recompute | (count > 1)
        return OpColumns(
            name=self._op_names,
            kind=Interned(kinds, kind),
            phase=ops.phase,
            dtype=np.where(is_copy, 0, given.op_dtype[source]),
            flops=np.where(is_copy, 0.0, given.flops[source] / count),
            bytes_touched=ops.num_bytes,
            workspace_bytes=np.where(is_copy, 0, -(-given.workspace_bytes[source] // count)),
            partner=ops.partner,
            group=np.where(is_copy, -1, given.group[source]),
            rng_order=np.where(is_again, -1, given.rng_order[source]),
            stream=ops.stream,
            module=Interned(given.modules, given.op_module[ops.beside]),
            signature=Interned(
                given.signatures, np.where(is_copy | (count > 1), -1, given.op_signature[source])
            ),
        )
