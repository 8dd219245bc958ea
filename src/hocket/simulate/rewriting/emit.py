"""Graph builder of the rewrite: writes a graph run by run while tensors change their places.

Ops are those of a given graph, whole, again or in part, or copies to and from the host. A tensor is
named by its number in the given graph; what stands for it by now is kept beside: the first making,
a later one, or what was fetched for its whole storage. Ops that follow each other are written
together, as columns: one step is written for every plan that is tried. O(ops + reads), numpy.
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
    from hocket.simulate.rewriting.chunks import Region
    from hocket.simulate.rewriting.nodes import BackwardNodes


# Columns of a graph that is written run by run: ops, tensors and what reads what.
#
# Ops are those of a given graph, whole, again or in part, or others: copies, and ops that only
# allocate memory. Ops that follow each other are written together. O(ops + reads), numpy.

_COPIES = {int(Stream.COPY_IN): "copy.in", int(Stream.COPY_OUT): "copy.out",
           int(Stream.COMPUTE): "reserve"}  # fmt: skip
"""Kinds of ops that are none of the given graph, by their streams."""


class WrittenOps(NamedTuple):
    """Ops that were written together; what they have in common with the given ones is added at the
    end."""

    origin: LongArray
    """Ops of the given graph; -1 for copies."""
    beside: LongArray
    """Ops of the given graph where they run."""
    num_parts: LongArray
    """Number of parts in which the given op is done; 0 for ops that only allocate memory."""
    is_recompute: BoolArray
    phase: LongArray
    stream: LongArray
    num_bytes: LongArray
    """That they read and write, or move."""
    partner: LongArray
    num_reads: LongArray
    reads: LongArray
    """One op after the other."""


class WrittenTensors(NamedTuple):
    """Tensors that were written together."""

    num_bytes: LongArray
    producer: LongArray
    role: LongArray
    alias_of: LongArray


class Columns:
    """Columns of the rewritten graph, to which ops of the given graph and new ones are added."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.op_names: list[str] = []
        self.tensor_names: list[str] = []
        self.ops: list[WrittenOps] = []
        self._tensors: list[WrittenTensors] = []
        self._ends: dict[int, int] = {}
        """Ops to the control tensors that tell of their ends."""

    @property
    def num_ops(self) -> int:
        """Ops that were written so far."""
        return len(self.op_names)

    def add_op(
        self, name: str, reads: LongArray, beside: int, num_parts: int, phase: int, stream: int,
        num_bytes: int,
    ) -> int:  # fmt: skip
        """An op that is none of the given graph."""
        one = (-1, beside, num_parts, False, phase, stream, num_bytes, -1, len(reads))
        self.ops.append(WrittenOps(*[*(np.array([value]) for value in one), reads]))
        self.op_names.append(name)
        return self.num_ops - 1

    def add_tensors(
        self, names: list[str], num_bytes: LongArray, producer: LongArray, role: LongArray,
        alias_of: LongArray,
    ) -> LongArray:  # fmt: skip
        """Tensors, whose numbers are returned."""
        first = len(self.tensor_names)
        self.tensor_names += names
        self._tensors.append(WrittenTensors(num_bytes, producer, role, alias_of))
        return first + np.arange(len(names))

    def read_more(self, run: int, tensors: LongArray) -> None:
        """The last of some ops that were written together reads some tensors more."""
        columns = self.ops[run]
        columns.num_reads[-1] += len(tensors)
        self.ops[run] = columns._replace(reads=np.append(columns.reads, tensors))

    def signal(self, op: int) -> int:
        """The control tensor that marks the end of a written op."""
        if op not in self._ends:
            (self._ends[op],) = self.signals_of(np.array([op]))
        return self._ends[op]

    def signals_of(self, ops: LongArray) -> list[int]:
        """The same of several."""
        names = [f"{self.op_names[op]}@end" for op in ops.tolist()]
        nothing = np.zeros(len(ops), dtype=np.int64)
        signal: list[int] = self.add_tensors(
            names, nothing, ops, nothing + int(Role.CONTROL), nothing - 1
        ).tolist()
        return signal

    def finished(self, name: str) -> tuple[Graph, IntArray, FloatArray, LongArray, IntArray]:
        """The graph, and the other columns of `Rewritten`."""
        ops = WrittenOps(*map(np.concatenate, zip(*self.ops, strict=True)))
        tensors = WrittenTensors(*map(np.concatenate, zip(*self._tensors, strict=True)))
        is_copy = ops.origin < 0
        graph = assemble(
            name,
            self._op_columns(ops, is_copy),
            TensorColumns(self.tensor_names, *tensors),
            pointers(ops.num_reads),
            ops.reads,
            meta=self._graph.meta,
        )
        moved = np.where(is_copy, ops.num_bytes, 0)
        origin, beside = ops.origin.astype(np.int32), ops.beside.astype(np.int32)
        share = np.where(ops.num_parts > 0, 1.0 / np.maximum(ops.num_parts, 1), 0.0)
        return graph, origin, share, moved, beside

    def _op_columns(self, ops: WrittenOps, is_copy: BoolArray) -> OpColumns:
        given, source = self._graph, np.maximum(ops.origin, 0)
        count = np.maximum(ops.num_parts, 1)
        kinds = tuple(dict.fromkeys((*given.kinds, *_COPIES.values())))
        kind = given.op_kind[source].copy()
        for stream, name in _COPIES.items():
            kind[is_copy & (ops.stream == stream)] = kinds.index(name)
        signature = np.where(is_copy | (count > 1), -1, given.op_signature[source])
        return OpColumns(
            name=self.op_names,
            kind=Interned(kinds, kind),
            phase=ops.phase,
            dtype=np.where(is_copy, 0, given.op_dtype[source]),
            flops=np.where(is_copy, 0.0, given.flops[source] / count),
            bytes_touched=ops.num_bytes,
            workspace_bytes=np.where(is_copy, 0, -(-given.workspace_bytes[source] // count)),
            partner=ops.partner,
            group=np.where(is_copy, -1, given.group[source]),
            # What draws random numbers again, or in parts, draws the same ones.
            rng_order=np.where(
                is_copy | ops.is_recompute | (count > 1), -1, given.rng_order[source]
            ),
            stream=ops.stream,
            module=Interned(given.modules, given.op_module[ops.beside]),
            signature=Interned(given.signatures, signature),
        )


class _LastRun(NamedTuple):
    """Ops of the computation that were written together last."""

    run: int
    """Their position among the columns."""
    op: int
    """The last of them."""
    first_made: int
    """The first tensor that they made."""
    producer: LongArray
    """The op that made each of these."""


class Emitter:
    """Columns of the graph that is written, and the current version of each given tensor."""

    def __init__(self, graph: Graph, nodes: BackwardNodes, casts: Casts) -> None:
        """Casts that are not made take neither time nor memory."""
        self.graph, self._nodes = without_casts(graph, casts), nodes
        self._is_done: BoolArray = ~np.isin(np.arange(graph.num_ops), casts.ops)
        self._holds: BoolArray = np.diff(nodes.held_ptr) > 0
        self.columns = Columns(graph)
        self.now: LongArray = np.full(graph.num_tensors, -1)
        """Per tensor: what was last made of it; -1 for nothing."""
        self._fetched: LongArray = np.full(graph.num_tensors, -1)
        """Per storage: what was fetched for it."""
        self._latest: LongArray = np.full(graph.num_tensors, -1)
        """Per storage: the last tensor that was made in it."""
        self._number: LongArray = np.zeros(graph.num_tensors, dtype=np.int64)
        """Number of times that each tensor was made: later versions get names of their own."""
        self._made_by: LongArray = np.full(graph.num_ops, -1)
        """Per op: what it was first written as."""
        self._waiting: list[int] = []
        """Control tensors that the next compute op waits for."""
        self._last = _LastRun(-1, -1, 0, np.zeros(0, dtype=np.int64))
        self._is_persistent: BoolArray = np.isin(np.arange(len(Role)), PERSISTENT_ROLES)
        reader = np.repeat(graph.op_phase, np.diff(graph.read_ptr))
        self._role: LongArray = graph.tensor_role.astype(np.int64)
        # The update of a gradient follows at once, and nothing else reads it.
        updating = graph.reads[reader == Phase.OPTIMIZER]
        passing = graph.root_of[updating[self._role[updating] == Role.GRADIENT]]
        is_passing = np.isin(graph.root_of, passing) & (self._role == Role.GRADIENT)
        self._role[is_passing] = Role.ACTIVATION

    # ── current versions of tensors ──────────────────────────────────────────────────────────────

    def has(self, tensors: IntArray) -> BoolArray:
        """True for each tensor that has a version in the rewritten graph."""
        return (self._fetched[self.graph.root_of[tensors]] >= 0) | (self.now[tensors] >= 0)

    def standing(self, tensors: IntArray | LongArray) -> LongArray:
        """Current versions of tensors in the rewritten graph; -1 for none."""
        fetched = self._fetched[self.graph.root_of[tensors]]
        return np.where(fetched >= 0, fetched, self.now[tensors])

    def latest(self, storage: int) -> int:
        """The last tensor that was made in a storage."""
        return int(self._latest[storage])

    def forget(self, storages: Iterable[int]) -> None:
        """Drop the fetched copies of these storages: they are not read any more."""
        self._fetched[self.graph.root_of[list(storages)]] = -1

    # ── when ops begin, and what is there until they end ─────────────────────────────────────────

    def wait(self, signal: Iterable[int]) -> None:
        """Let the next compute op wait for these control tensors."""
        self._waiting += signal

    def hold(self, tensors: LongArray) -> None:
        """Hold tensors until the last written compute op ends."""
        last = self._last
        if last.op < 0 or not len(tensors):
            return
        own = tensors - last.first_made
        made_by = np.append(last.producer, last.op)[np.clip(own, 0, len(last.producer))]
        is_before = (tensors >= 0) & ((own < 0) | (made_by < last.op))
        self.columns.read_more(last.run, tensors[is_before])

    def last_signals(self) -> list[int]:
        """The control tensor that marks the end of the last written compute op; none before the
        first."""
        return [self.columns.signal(self._last.op)] if self._last.op >= 0 else []

    # ── ops of the graph ─────────────────────────────────────────────────────────────────────────

    def run(
        self, ops: Sequence[int] | LongArray, *, suffix: str = "", is_recompute: bool = False
    ) -> None:  # fmt: skip
        """Ops of the graph one after the other."""
        ops = np.asarray(ops, dtype=np.int64)
        if not len(ops):
            return
        made, maker = spans(self.graph.made_ptr, ops)
        if is_recompute:
            is_new = ~self._is_persistent[self._role[made]]
            made, maker = made[is_new], maker[is_new]
            # A later module call may have fetched it as its input, and has used it.
            self._fetched[made[self.graph.root_of[made] == made]] = -1
        producer = self.columns.num_ops + maker
        self._make(made, producer, self.graph.tensor_bytes[made])
        reads, num_reads = self._reads_now(ops, is_recompute=is_recompute)
        self._like(ops, [suffix] * len(ops), reads, num_reads, producer, is_recompute=is_recompute)

    def host_resident(self, ops: Sequence[int], after: Sequence[int], num_bytes: LongArray) -> None:
        """Updates on the host, once copies have ended, that read and write so many bytes."""
        count = len(ops)
        self._like(
            np.array(ops), [""] * count, np.tile(after, count), np.full(count, len(after)),
            np.zeros(0, dtype=np.int64), stream=Stream.HOST, num_bytes=num_bytes,
        )  # fmt: skip

    def beside(self, ops: Sequence[int], number: int, num_parts: int) -> list[int]:
        """One of ``num_parts`` parts of updates on the device, concurrent with compute and in turn
        with copies to the host; returns the control tensors of their ends."""
        first, count = self.columns.num_ops, len(ops)
        self._parts(
            np.array(ops), [f"@{number}" if num_parts > 1 else ""] * count,
            np.full(count, num_parts), (), grows=False, stream=Stream.COPY_OUT,
        )  # fmt: skip
        return self.columns.signals_of(first + np.arange(count))

    def chunk(
        self, ops: Sequence[int], region: Region, chunk: int, count: int, *, is_recompute: bool
    ) -> None:
        """A part of each op of a region, one after the other; what leaves the region is made whole
        and added to by later chunks. What is done once is done with the first. Until the chunk is
        over, what it adds is there besides."""
        given = np.array(ops, dtype=np.int64)
        is_once = np.isin(given, list(region.once))
        self.run(given[is_once] if not chunk and not is_recompute else ())
        given = given[~is_once]
        if not len(given):
            return
        whole = [] if is_recompute else list(region.whole)
        suffix = f"@again{chunk}" if is_recompute else f"@{chunk}"
        parts = np.full(len(given), count)
        self._parts(
            given, [suffix] * len(given), parts, whole, grows=chunk > 0, is_recompute=is_recompute,
            with_addends=True,
        )  # fmt: skip

    def part(
        self, op: int, number: int, count: int, whole: Collection[int], *, suffix: str,
        is_recompute: bool = False,
    ) -> int:  # fmt: skip
        """One of so many parts of an op, which is returned; storages of ``whole`` are made by the
        first part and added to by later ones, of others each part makes its own."""
        self._parts(
            np.array([op]), [suffix], np.array([count]), list(whole), grows=number > 0,
            is_recompute=is_recompute,
        )  # fmt: skip
        return self.columns.num_ops - 1

    def narrow(self, op: int, tensor: int, num_bytes: int) -> None:
        """Round the result of an op to so many bytes; the rounded version replaces it."""
        wide, producer = self.standing(np.array([tensor])), np.array([self.columns.num_ops])
        self._make(np.array([tensor]), producer, np.array([num_bytes]))
        self._like(np.array([op]), ["@narrow"], wide, np.array([1]), producer)

    def _parts(
        self, ops: LongArray, suffixes: Sequence[str], num_parts: LongArray, whole: Sequence[int],
        *, grows: bool, is_recompute: bool = False, with_addends: bool = False,
        stream: Stream | None = None,
    ) -> None:  # fmt: skip
        graph = self.graph
        made, maker = spans(graph.made_ptr, ops)
        parts = np.where(np.isin(graph.root_of[made], whole), 1, num_parts[maker])
        is_grown = np.isin(made, whole) & grows & (num_parts[maker] > 1)
        grown, producer = self.now[made[is_grown]], self.columns.num_ops + maker
        self._make(made, producer, -(-graph.tensor_bytes[made] // parts), is_grown, grown)
        reads, num_reads = self._reads_now(ops)
        at = np.cumsum(num_reads)[maker[is_grown]]
        reads = np.insert(reads, at, grown)
        num_reads += np.bincount(maker[is_grown], minlength=len(ops))
        self._like(
            ops,
            suffixes,
            reads,
            num_reads,
            producer,
            num_parts,
            is_recompute=is_recompute,
            stream=stream,
        )
        if with_addends:
            is_added = np.isin(made, whole) & (graph.alias_of[made] < 0)
            is_added &= graph.op_phase[ops[maker]] == Phase.BACKWARD
            self._add_addends(made[is_added], producer[is_added], num_parts[maker[is_added]])

    def _add_addends(self, tensors: LongArray, producer: LongArray, num_parts: LongArray) -> None:
        """Summands that chunks add to whole tensors, held until the last written op ends. Of
        parameters each chunk has a whole gradient, in the type that it is computed in, of all else
        its part."""
        graph = self.graph
        is_gradient = graph.tensor_role[tensors] == Role.GRADIENT
        makers = graph.tensor_producer[tensors].tolist()
        computed = [int(graph.reads_of(op)[0]) if graph.kind_of(op) == CAST else tensor
                    for op, tensor in zip(makers, tensors.tolist(), strict=True)]  # fmt: skip
        sizes = graph.tensor_bytes[computed] // np.where(is_gradient, 1, num_parts)
        role = np.full(len(tensors), int(Role.ACTIVATION))
        added = self.columns.add_tensors(
            [f"{graph.tensor_names[t]}@part{p}"
             for t, p in zip(tensors.tolist(), producer.tolist(), strict=True)],
            sizes, producer, role, role * 0 - 1,
        )  # fmt: skip
        self.columns.read_more(self._last.run, added[producer < self._last.op])

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    def copy(
        self,
        name: str,
        stream: Stream,
        num_bytes: int,
        *,
        reads: Iterable[int],
        beside: int,
        phase: Phase = Phase.BACKWARD,
    ) -> int:
        """A copy to or from the host; returns the control tensor that marks its end."""
        return self.columns.signal(self._copy(name, stream, num_bytes, reads, beside, phase))

    def reserve(self, tensors: Sequence[int], beside: int) -> list[int]:
        """Allocate memory on the compute stream from here on for tensors to be copied into it."""
        given = np.array(tensors, dtype=np.int64)
        waits, self._waiting = np.array(self._waiting, dtype=np.int64), []
        stream = int(Stream.COMPUTE)
        name = f"{self.graph.tensor_names[given[0]]}@reserve:{self.columns.num_ops}"
        new = self.columns.add_op(name, waits, beside, 0, int(Phase.BACKWARD), stream, 0)
        role, producer = np.full(len(given), int(Role.ACTIVATION)), np.full(len(given), new)
        names = [f"{self.graph.tensor_names[t]}@reserve:{new}" for t in given.tolist()]
        run, first_made = len(self.columns.ops) - 1, len(self.columns.tensor_names)
        self._last = _LastRun(run, new, first_made, producer)
        made: list[int] = self.columns.add_tensors(
            names, self.graph.tensor_bytes[given], producer, role, role * 0 - 1
        ).tolist()
        return made

    def fetch(
        self, name: str, tensors: Sequence[int], sizes: LongArray, *, reads: Iterable[int],
        beside: int, phase: Phase, buffer: int = -1, is_held: bool = True,
    ) -> list[int]:  # fmt: skip
        """A copy from the host that replaces the storages of these tensors from now on. ``sizes``
        has the bytes of each by its number. They take memory unless they lie in a reserved buffer
        (not ``is_held``) or in ``buffer``. Returns the new tensors."""
        given = np.array(tensors, dtype=np.int64)
        new = self._copy(name, Stream.COPY_IN, int(sizes[given].sum()), reads, beside, phase)
        # Parameters of one storage, such as those of a layer of cuDNN, come in one.
        roots = np.array(list(dict.fromkeys(self.graph.root_of[given].tolist())), dtype=np.int64)
        role = np.full(len(roots), int(Role.ACTIVATION))
        self._fetched[roots] = self.columns.add_tensors(
            self._names(roots),
            sizes[roots] * is_held,
            np.full(len(roots), new),
            role,
            np.full(len(roots), buffer),
        )
        found: list[int] = self._fetched[roots].tolist()
        return found

    # ── what is there before the step ────────────────────────────────────────────────────────────

    def persistent(self, tensors: LongArray, sizes: LongArray) -> None:
        """Tensors of the graph that are there before the step; how many bytes each has is in
        ``sizes``, by its number."""
        self._make(tensors, np.full(len(tensors), -1), sizes[tensors])

    def lasting(self, name: str, num_bytes: int) -> int:
        """Device memory that is reserved for the whole step."""
        columns = (np.array([value]) for value in (num_bytes, -1, int(Role.BUFFER), -1))
        return int(self.columns.add_tensors([name], *columns)[0])

    # ── columns ──────────────────────────────────────────────────────────────────────────────────

    def _make(
        self, tensors: LongArray, producer: LongArray, num_bytes: LongArray,
        is_grown: BoolArray | None = None, grown: LongArray | None = None,
    ) -> None:  # fmt: skip
        """Tensors of the graph, made by ops that were written, or there before the step; those that
        are ``grown`` are added to others."""
        graph, role = self.graph, self._role[tensors]
        first = len(self.columns.tensor_names)
        new = first + np.arange(len(tensors))
        self.now[tensors] = new
        base = graph.alias_of[tensors]
        is_alias = base >= 0
        alias_of = np.where(is_alias, self.standing(np.maximum(base, 0)), -1)
        # What changes a parameter that was fetched leaves with it.
        is_brought = is_alias & (self._fetched[graph.root_of[np.maximum(base, 0)]] >= 0)
        if is_grown is not None:
            alias_of[is_grown], is_brought = grown, is_brought & ~is_grown
        role = np.where(is_brought & self._is_persistent[role], int(Role.ACTIVATION), role)
        self.columns.add_tensors(self._names(tensors), num_bytes, producer, role, alias_of)
        # Of several tensors in one storage the last one stays.
        self._latest[graph.root_of[tensors]] = new

    def _reads_now(
        self, ops: LongArray, *, is_recompute: bool = False
    ) -> tuple[LongArray, LongArray]:
        """Tensors that ops read or hold, one op after the other, and their number per op.
        Recomputed ops hold nothing more, since no caller keeps their inputs."""
        at, reader = spans(self.graph.read_ptr, ops)
        read = self.standing(self.graph.reads[at])
        num_reads = np.bincount(reader, minlength=len(ops))
        if is_recompute or not self._holds[ops].any():
            return read, num_reads
        at, holder = spans(self._nodes.held_ptr, ops)
        held = self.standing(self._nodes.held[at])
        # A tensor that is made in groups has no version of the whole.
        holder, held = holder[held >= 0], held[held >= 0]
        reads = np.insert(read, pointers(num_reads)[holder + 1], held)
        return reads, num_reads + np.bincount(holder, minlength=len(ops))

    def _like(
        self, ops: LongArray, suffixes: Sequence[str], reads: LongArray, num_reads: LongArray,
        producer: LongArray, num_parts: LongArray | None = None, *, is_recompute: bool = False,
        stream: Stream | None = None, num_bytes: LongArray | None = None,
    ) -> None:  # fmt: skip
        """Ops that do what ops of the graph do, or parts of it; ``producer`` are those of the
        tensors that were made of them last. Without a stream they are of the computation."""
        if stream is None:
            reads = np.append(np.array(self._waiting, dtype=np.int64), reads)
            num_reads[0] += len(self._waiting)
            first_made = len(self.columns.tensor_names) - len(producer)
            last = self.columns.num_ops + len(ops) - 1
            self._last = _LastRun(len(self.columns.ops), last, first_made, producer)
            self._waiting = []
        graph, names = self.graph, self.graph.op_names
        parts = np.ones(len(ops), dtype=np.int64) if num_parts is None else num_parts
        parts = parts * self._is_done[ops]
        new = self.columns.num_ops + np.arange(len(ops))
        given = zip(ops.tolist(), suffixes, strict=True)
        self.columns.op_names += [names[op] + suffix for op, suffix in given]
        phase = graph.op_phase[ops].astype(np.int64)
        partner = graph.partner[ops]
        is_new = self._made_by[ops] < 0
        self._made_by[ops[is_new]] = new[is_new]
        first = self._made_by[np.maximum(partner, 0)]
        self.columns.ops.append(WrittenOps(
            origin=ops, beside=ops, num_parts=parts, is_recompute=np.full(len(ops), is_recompute),
            phase=np.where(is_recompute & (phase == Phase.FORWARD), int(Phase.BACKWARD), phase),
            stream=np.where(stream is None, graph.op_stream[ops], int(stream or 0)),
            num_bytes=graph.bytes_touched[ops] // np.maximum(parts, 1) if num_bytes is None
            else num_bytes,
            partner=np.where(partner >= 0, first, -1), num_reads=num_reads, reads=reads,
        ))  # fmt: skip

    def _copy(
        self, name: str, stream: Stream, num_bytes: int, reads: Iterable[int], beside: int,
        phase: Phase,
    ) -> int:  # fmt: skip
        read = np.array(list(reads), dtype=np.int64)
        return self.columns.add_op(name, read, beside, 1, int(phase), int(stream), num_bytes)

    def _names(self, tensors: LongArray) -> list[str]:
        """Names of further makings of tensors."""
        names, number = self.graph.tensor_names, self._number[tensors]
        self._number[tensors] = number + 1
        given = [names[tensor] for tensor in tensors.tolist()]
        if not number.any():
            return given
        return [f"{n}@{k}" if k else n for n, k in zip(given, number.tolist(), strict=True)]
