"""Write a graph run by run while tensors change their places: the pen of the rewrite.

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

if TYPE_CHECKING:
    from hocket.simulate.rewriting.chunks import Region

_COPIES = {int(Stream.COPY_IN): "copy.in", int(Stream.COPY_OUT): "copy.out"}


class _OpColumns(NamedTuple):
    """Ops that were written together; what they have in common with the given ones is added at the
    end."""

    origin: LongArray
    """Ops of the given graph; -1 for copies."""
    beside: LongArray
    """Ops of the given graph where they run."""
    num_parts: LongArray
    """In how many parts the given op is done."""
    is_again: BoolArray
    phase: LongArray
    stream: LongArray
    num_bytes: LongArray
    """That they read and write, or move."""
    partner: LongArray
    num_reads: LongArray
    reads: LongArray
    """One op after the other."""


class _TensorColumns(NamedTuple):
    """Tensors that were written together."""

    num_bytes: LongArray
    producer: LongArray
    role: LongArray
    alias_of: LongArray


class Emitter:
    """Columns of the graph that is written, and what stands for each tensor of the given one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.now: LongArray = np.full(graph.num_tensors, -1)
        """Per tensor: what was last made of it; -1 for nothing."""
        self._fetched: LongArray = np.full(graph.num_tensors, -1)
        """Per storage: what was fetched for it."""
        self._latest: LongArray = np.full(graph.num_tensors, -1)
        """Per storage: the last tensor that was made in it."""
        self._number: LongArray = np.zeros(graph.num_tensors, dtype=np.int64)
        """How often each tensor was made: its further makings get names of their own."""
        self._made_by: LongArray = np.full(graph.num_ops, -1)
        """Per op: what it was first written as."""
        self._op_names: list[str] = []
        self._tensor_names: list[str] = []
        self._ops: list[_OpColumns] = []
        self._tensors: list[_TensorColumns] = []
        self._is_persistent: BoolArray = np.isin(np.arange(len(Role)), PERSISTENT_ROLES)
        reader = np.repeat(graph.op_phase, np.diff(graph.read_ptr))
        self._role: LongArray = graph.tensor_role.astype(np.int64)
        # The update of a gradient follows at once, and nobody else asks for it.
        updating = graph.reads[reader == Phase.OPTIMIZER]
        is_passing = self._role[updating] == Role.GRADIENT
        self._role[updating[is_passing]] = Role.ACTIVATION

    # ── what stands for a tensor ─────────────────────────────────────────────────────────────────

    def has(self, tensors: IntArray) -> BoolArray:
        """Whether something stands for each tensor."""
        return (self._fetched[self.graph.root_of[tensors]] >= 0) | (self.now[tensors] >= 0)

    def _standing(self, tensors: IntArray) -> LongArray:
        """What stands for tensors now."""
        fetched = self._fetched[self.graph.root_of[tensors]]
        return np.where(fetched >= 0, fetched, self.now[tensors])

    def latest(self, storage: int) -> int:
        """The last tensor that was made in a storage."""
        return int(self._latest[storage])

    def forget(self, storages: Iterable[int]) -> None:
        """What was fetched for these storages is not read any more."""
        self._fetched[self.graph.root_of[list(storages)]] = -1

    # ── ops of the graph ─────────────────────────────────────────────────────────────────────────

    def run(
        self, ops: Sequence[int] | LongArray, *, suffix: str = "", is_again: bool = False,
        also_reads: Sequence[int] = (), tells: bool = False,
    ) -> int | None:  # fmt: skip
        """Ops of the graph one after the other; the first one reads some tensors more. With
        ``tells`` the last one makes a control tensor, which is returned."""
        ops = np.asarray(ops, dtype=np.int64)
        if not len(ops):
            return None
        made, maker = spans(self.graph.made_ptr, ops)
        if is_again:
            is_new = ~self._is_persistent[self._role[made]]
            made, maker = made[is_new], maker[is_new]
        first = self._num_ops
        self._make(made, first + maker, self.graph.tensor_bytes[made])
        reads, num_reads = self._reads_now(ops, also_reads)
        self._like(ops, [suffix] * len(ops), reads, num_reads, is_again=is_again)
        return self.told(self._num_ops - 1) if tells else None

    def at_home(self, ops: Sequence[int], after: Sequence[int], num_bytes: LongArray) -> None:
        """Updates on the host, once copies have ended, that read and write so many bytes."""
        count = len(ops)
        self._like(
            np.array(ops), [""] * count, np.tile(after, count), np.full(count, len(after)),
            stream=Stream.HOST, num_bytes=num_bytes,
        )  # fmt: skip

    def beside(self, ops: Sequence[int], number: int, num_parts: int) -> list[int]:
        """One of so many parts of updates on the device beside the computation, in turn with what
        is sent; returns what tells of their ends."""
        first, count = self._num_ops, len(ops)
        self._parts(
            np.array(ops), [f"@{number}" if num_parts > 1 else ""] * count,
            np.full(count, num_parts), (), grows=False, is_again=False, stream=Stream.COPY_OUT,
        )  # fmt: skip
        return self._told(first + np.arange(count))

    def chunk(
        self, ops: LongArray, region: Region, chunk: int, count: int, *, tells: bool,
        also_reads: Sequence[int] = (),
    ) -> int | None:  # fmt: skip
        """A part of each op, one after the other; what leaves the region is made whole and added to
        by later chunks. What is done once is done with the first."""
        is_once = np.isin(ops, list(region.once))
        if chunk:
            ops, is_once = ops[~is_once], is_once[~is_once]
        suffixes = ["" if once else f"@{chunk}" for once in is_once.tolist()]
        parts = np.where(is_once, 1, count)
        self._parts(
            ops, suffixes, parts, list(region.whole), grows=chunk > 0, is_again=chunk > 0,
            also_reads=also_reads,
        )  # fmt: skip
        return self.told(self._num_ops - 1) if tells else None

    def part(
        self, op: int, number: int, count: int, whole: Collection[int], *, suffix: str,
        is_again: bool = False, also_reads: Sequence[int] = (), stream: Stream | None = None,
    ) -> int:  # fmt: skip
        """One of so many parts of an op, which is returned; storages of ``whole`` are made by the
        first part and added to by later ones, of others each part makes its own."""
        self._parts(
            np.array([op]), [suffix], np.array([count]), list(whole), grows=number > 0,
            is_again=is_again, also_reads=also_reads, stream=stream,
        )  # fmt: skip
        return self._num_ops - 1

    def _parts(
        self, ops: LongArray, suffixes: Sequence[str], num_parts: LongArray, whole: Sequence[int],
        *, grows: bool, is_again: bool, also_reads: Sequence[int] = (),
        stream: Stream | None = None,
    ) -> None:  # fmt: skip
        graph, first = self.graph, self._num_ops
        made, maker = spans(graph.made_ptr, ops)
        parts = np.where(np.isin(graph.root_of[made], whole), 1, num_parts[maker])
        is_grown = np.isin(made, whole) & grows & (num_parts[maker] > 1)
        grown = self.now[made[is_grown]]
        self._make(made, first + maker, -(-graph.tensor_bytes[made] // parts), is_grown, grown)
        reads, num_reads = self._reads_now(ops, also_reads)
        at = np.cumsum(num_reads)[maker[is_grown]]
        reads = np.insert(reads, at, grown)
        num_reads += np.bincount(maker[is_grown], minlength=len(ops))
        self._like(ops, suffixes, reads, num_reads, num_parts, is_again=is_again, stream=stream)

    def told(self, op: int) -> int:
        """The control tensor that tells of the end of an op that was written."""
        return self._told(np.array([op]))[0]

    def _told(self, ops: LongArray) -> list[int]:
        names = [f"{self._op_names[op]}@end" for op in ops.tolist()]
        nothing = np.zeros(len(ops), dtype=np.int64)
        told: list[int] = self._add_tensors(
            names, nothing, ops, nothing + int(Role.CONTROL), nothing - 1
        ).tolist()
        return told

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
        """A copy to or from the host; returns the control tensor that tells of its end."""
        return self.told(self._copy(name, stream, num_bytes, reads, beside, phase))

    def fetch(
        self, name: str, tensors: Sequence[int], sizes: LongArray, *, reads: Iterable[int],
        beside: int, phase: Phase, is_held: bool = True,
    ) -> list[int]:  # fmt: skip
        """A copy from the host that stands for the storages of these tensors from now on; how many
        bytes each has is in ``sizes``, by its number, and held unless they lie in what lasts.
        Returns what it made."""
        given = np.array(tensors, dtype=np.int64)
        new = self._copy(name, Stream.COPY_IN, int(sizes[given].sum()), reads, beside, phase)
        roots = self.graph.root_of[given].astype(np.int64)
        role = np.full(len(roots), int(Role.ACTIVATION))
        self._fetched[roots] = self._add_tensors(
            self._names(roots), sizes[roots] * is_held, np.full(len(roots), new), role, role * 0 - 1
        )
        found: list[int] = self._fetched[roots].tolist()
        return found

    # ── what is there before the step ────────────────────────────────────────────────────────────

    def persistent(self, tensors: LongArray) -> None:
        """Tensors of the graph that are there before the step."""
        none = np.full(len(tensors), -1)
        self._make(tensors, none, self.graph.tensor_bytes[tensors])

    def lasting(self, name: str, num_bytes: int) -> int:
        """Room on the device that is there all the time."""
        columns = (np.array([value]) for value in (num_bytes, -1, int(Role.BUFFER), -1))
        return int(self._add_tensors([name], *columns)[0])

    @property
    def _num_ops(self) -> int:
        return len(self._op_names)

    # ── columns ──────────────────────────────────────────────────────────────────────────────────

    def _make(
        self, tensors: LongArray, producer: LongArray, num_bytes: LongArray,
        is_grown: BoolArray | None = None, grown: LongArray | None = None,
    ) -> None:  # fmt: skip
        """Tensors of the graph, made by ops that were written, or there before the step; those that
        are ``grown`` are added to others."""
        graph, role = self.graph, self._role[tensors]
        first = len(self._tensor_names)
        new = first + np.arange(len(tensors))
        self.now[tensors] = new
        base = graph.alias_of[tensors]
        is_alias = base >= 0
        alias_of = np.where(is_alias, self._standing(np.maximum(base, 0)), -1)
        # What changes a parameter that was fetched leaves with it.
        is_brought = is_alias & (self._fetched[graph.root_of[np.maximum(base, 0)]] >= 0)
        if is_grown is not None:
            alias_of[is_grown], is_brought = grown, is_brought & ~is_grown
        role = np.where(is_brought & self._is_persistent[role], int(Role.ACTIVATION), role)
        self._add_tensors(self._names(tensors), num_bytes, producer, role, alias_of)
        # Of several tensors in one storage the last one stays.
        self._latest[graph.root_of[tensors]] = new

    def _reads_now(self, ops: LongArray, also_reads: Sequence[int]) -> tuple[LongArray, LongArray]:
        """What ops read, one op after the other, and how many each; the first some more."""
        at, reader = spans(self.graph.read_ptr, ops)
        num_reads = np.bincount(reader, minlength=len(ops))
        num_reads[0] += len(also_reads)
        more = np.array(also_reads, dtype=np.int64)
        return np.append(more, self._standing(self.graph.reads[at])), num_reads

    def _like(
        self, ops: LongArray, suffixes: Sequence[str], reads: LongArray, num_reads: LongArray,
        num_parts: LongArray | None = None, *, is_again: bool = False,
        stream: Stream | None = None, num_bytes: LongArray | None = None,
    ) -> None:  # fmt: skip
        """Ops that do what ops of the graph do, or parts of it."""
        graph, names = self.graph, self.graph.op_names
        parts = np.ones(len(ops), dtype=np.int64) if num_parts is None else num_parts
        new = self._num_ops + np.arange(len(ops))
        self._op_names += [names[op] + s for op, s in zip(ops.tolist(), suffixes, strict=True)]
        phase = graph.op_phase[ops].astype(np.int64)
        partner = graph.partner[ops]
        is_new = self._made_by[ops] < 0
        self._made_by[ops[is_new]] = new[is_new]
        first = self._made_by[np.maximum(partner, 0)]
        self._ops.append(_OpColumns(
            origin=ops, beside=ops, num_parts=parts, is_again=np.full(len(ops), is_again),
            phase=np.where(is_again & (phase == Phase.FORWARD), int(Phase.BACKWARD), phase),
            stream=np.where(stream is None, graph.op_stream[ops], int(stream or 0)),
            num_bytes=graph.bytes_touched[ops] // parts if num_bytes is None else num_bytes,
            partner=np.where(partner >= 0, first, -1), num_reads=num_reads, reads=reads,
        ))  # fmt: skip

    def _copy(
        self, name: str, stream: Stream, num_bytes: int, reads: Iterable[int], beside: int,
        phase: Phase,
    ) -> int:  # fmt: skip
        read = np.array(list(reads), dtype=np.int64)
        one = (-1, beside, 1, False, int(phase), int(stream), num_bytes, -1, len(read))
        self._ops.append(_OpColumns(*[*(np.array([value]) for value in one), read]))
        self._op_names.append(name)
        return self._num_ops - 1

    def _names(self, tensors: LongArray) -> list[str]:
        """Names of further makings of tensors."""
        names, number = self.graph.tensor_names, self._number[tensors]
        self._number[tensors] = number + 1
        given = [names[tensor] for tensor in tensors.tolist()]
        if not number.any():
            return given
        return [f"{n}@{k}" if k else n for n, k in zip(given, number.tolist(), strict=True)]

    def _add_tensors(
        self, names: list[str], num_bytes: LongArray, producer: LongArray, role: LongArray,
        alias_of: LongArray,
    ) -> LongArray:  # fmt: skip
        first = len(self._tensor_names)
        self._tensor_names += names
        self._tensors.append(_TensorColumns(num_bytes, producer, role, alias_of))
        return first + np.arange(len(names))

    # ── the whole ────────────────────────────────────────────────────────────────────────────────

    def finished(self, name: str) -> tuple[Graph, IntArray, FloatArray, LongArray, IntArray]:
        """The graph, and the columns of `Rewritten` beside it."""
        ops = _OpColumns(*map(np.concatenate, zip(*self._ops, strict=True)))
        tensors = _TensorColumns(*map(np.concatenate, zip(*self._tensors, strict=True)))
        is_copy = ops.origin < 0
        graph = assemble(
            name,
            self._op_columns(ops, is_copy),
            TensorColumns(self._tensor_names, *tensors),
            pointers(ops.num_reads),
            ops.reads,
            meta=self.graph.meta,
        )
        moved = np.where(is_copy, ops.num_bytes, 0)
        origin, beside = ops.origin.astype(np.int32), ops.beside.astype(np.int32)
        return graph, origin, 1.0 / ops.num_parts, moved, beside

    def _op_columns(self, ops: _OpColumns, is_copy: BoolArray) -> OpColumns:
        given, source, count = self.graph, np.maximum(ops.origin, 0), ops.num_parts
        kinds = tuple(dict.fromkeys((*given.kinds, *_COPIES.values())))
        kind = given.op_kind[source].copy()
        for stream, name in _COPIES.items():
            kind[is_copy & (ops.stream == stream)] = kinds.index(name)
        signature = np.where(is_copy | (count > 1), -1, given.op_signature[source])
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
            # What draws random numbers again draws the same ones.
            rng_order=np.where(is_copy | ops.is_again, -1, given.rng_order[source]),
            stream=ops.stream,
            module=Interned(given.modules, given.op_module[ops.beside]),
            signature=Interned(given.signatures, signature),
        )
