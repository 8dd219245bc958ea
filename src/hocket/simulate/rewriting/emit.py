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
_NONE = -1


class WrittenOps(NamedTuple):
    """Columns of ops that were written together; other columns follow from their origins."""

    origin: LongArray
    """Ops of the given graph; -1 for copies."""
    neighbor: LongArray
    """Ops of the given graph, on whose devices the written ops run."""
    num_parts: LongArray
    """Number of parts into which the given op is split; 0 for ops that only allocate memory."""
    is_recompute: BoolArray
    phase: LongArray
    stream: LongArray
    num_bytes: LongArray
    """Bytes that each op reads and writes, or copies."""
    partner: LongArray


class WrittenTensors(NamedTuple):
    """Columns of tensors that were written together."""

    num_bytes: LongArray
    producer: LongArray
    role: LongArray
    alias_of: LongArray


class Emitter:
    """Columns of the rewritten graph, and the current version of each tensor of the given graph."""

    def __init__(self, graph: Graph, nodes: BackwardNodes, casts: Casts) -> None:
        """``casts`` take neither time nor memory."""
        self.graph, self._nodes = without_casts(graph, casts), nodes
        self._is_done: BoolArray = ~np.isin(np.arange(graph.num_ops), casts.ops)
        self._op_names: list[str] = []
        self._tensor_names: list[str] = []
        self._ops: list[WrittenOps] = []
        self._tensors: list[WrittenTensors] = []
        self._producer: list[int] = []
        """Op that makes each written tensor; -1 for tensors from before the step."""
        self._readers: list[LongArray] = []
        self._reads: list[LongArray] = []
        """Tensors that written ops read; ``_readers`` has the op of each entry."""
        self._ends: dict[int, int] = {}
        """Written ops, mapped to the control tensors that signal their ends."""
        self.now: LongArray = np.full(graph.num_tensors, _NONE)
        """Per tensor: its current version in the rewritten graph; -1 for none."""
        self._fetched: LongArray = self.now.copy()
        """Per storage: its fetched copy; -1 for none."""
        self._latest: LongArray = self.now.copy()
        """Per storage: the last tensor that was written in it; -1 for none."""
        self._number: LongArray = np.zeros(graph.num_tensors, dtype=np.int64)
        """Per tensor: its number of versions, which distinguishes their names."""
        self._made_by: LongArray = np.full(graph.num_ops, _NONE)
        """Per op: the first op written for it."""
        self._waiting: list[int] = []
        """Control tensors that the next compute op waits for."""
        self._last = _NONE
        """The compute op that was written last."""
        self._is_persistent: BoolArray = np.isin(np.arange(len(Role)), PERSISTENT_ROLES)
        self._role: LongArray = graph.tensor_role.astype(np.int64)
        # The update reads a gradient right after it is made and frees it, so gradients are not
        # held.
        updating = graph.reads[graph.op_phase[graph.reader] == Phase.OPTIMIZER]
        passing = graph.root_of[updating[self._role[updating] == Role.GRADIENT]]
        is_passing = np.isin(graph.root_of, passing) & (self._role == Role.GRADIENT)
        self._role[is_passing] = Role.ACTIVATION

    # ── current versions of tensors ──────────────────────────────────────────────────────────────

    def current(self, tensors: IntArray | LongArray) -> LongArray:
        """Return the current versions of tensors in the rewritten graph; -1 for none."""
        fetched = self._fetched[self.graph.root_of[tensors]]
        return np.where(fetched >= 0, fetched, self.now[tensors])

    def latest(self, storage: int) -> int:
        """Return the last tensor that was made in a storage."""
        return int(self._latest[storage])

    def forget(self, storages: Iterable[int]) -> None:
        """Drop the fetched copies of these storages."""
        self._fetched[self.graph.root_of[list(storages)]] = _NONE

    # ── begins and ends ──────────────────────────────────────────────────────────────────────────

    def wait(self, signals: Iterable[int]) -> None:
        """Let the next compute op wait for these control tensors."""
        self._waiting += signals

    def hold(self, tensors: LongArray) -> None:
        """Hold tensors until the last written compute op ends."""
        held = [t for t in tensors.tolist() if t >= 0 and self._producer[t] < self._last]
        if held:
            self._read(self._last, held)

    def last_signals(self) -> list[int]:
        """Return the control tensor that signals the last compute op's end; empty before it."""
        return self.signals([self._last]) if self._last >= 0 else []

    def signals(self, ops: Iterable[int]) -> list[int]:
        """Return control tensors that signal the ends of written ops."""
        ops = list(ops)
        new = [op for op in ops if op not in self._ends]
        names = [f"{self._op_names[op]}@end" for op in new]
        made = self._add_tensors(names, 0, np.array(new, dtype=np.int64), Role.CONTROL)
        self._ends.update(zip(new, made.tolist(), strict=True))
        return [self._ends[op] for op in ops]

    # ── ops of the graph ─────────────────────────────────────────────────────────────────────────

    def write(
        self, ops: Sequence[int] | LongArray, *, suffix: str = "", is_recompute: bool = False,
        parts: int = 1, whole: Collection[int] = (), grows: bool = False,
        stream: Stream | None = None,
    ) -> list[int]:  # fmt: skip
        """Write ops of the graph one after another, each in full or one of its ``parts``; return
        them.

        Storages in ``whole`` are allocated in full by the first part, and later parts, which
        ``grows`` marks, add to them. The values that a part adds are held until the last of these
        ops ends. Of other storages each part makes its own. Without a ``stream`` the ops run on
        their own.
        """
        graph, ops = self.graph, np.asarray(ops, dtype=np.int64)
        if not len(ops):
            return []
        made, maker = spans(graph.made_ptr, ops)
        if is_recompute:
            is_new = ~self._is_persistent[self._role[made]]
            made, maker = made[is_new], maker[is_new]
            # A later module call may have fetched this storage as its input, and has finished with
            # it.
            self._fetched[made[graph.root_of[made] == made]] = _NONE
        new = len(self._op_names) + np.arange(len(ops))
        producer, owners = new[maker], list(whole)
        is_grown = np.isin(made, owners) & grows
        grown = self.now[made[is_grown]]
        divisor = np.where(np.isin(graph.root_of[made], owners), 1, parts)
        self._make(made, producer, -(-graph.tensor_bytes[made] // divisor), is_grown, grown)
        self._read(producer[is_grown], grown)
        at, reader = spans(graph.read_ptr, ops)
        self._read(new[reader], self.current(graph.reads[at]))
        # Inputs of recomputed ops are referenced by no caller.
        if not is_recompute or parts > 1:
            at, holder = spans(self._nodes.held_ptr, ops)
            held = self.current(self._nodes.held[at])
            # A tensor that is made in chunks has no full version.
            self._read(new[holder[held >= 0]], held[held >= 0])
        self._write(ops, suffix, parts=parts, is_recompute=is_recompute, stream=stream)
        if owners:
            is_added = np.isin(made, owners) & (graph.alias_of[made] < 0)
            is_added &= graph.op_phase[ops[maker]] == Phase.BACKWARD
            self._hold_addends(made[is_added], producer[is_added], parts)
        found: list[int] = new.tolist()
        return found

    def update_on_host(
        self, ops: Sequence[int], after: Sequence[int], num_bytes: LongArray
    ) -> None:
        """Write host updates, which start after copies, with their host memory traffic."""
        for number in range(len(ops)):
            self._read(len(self._op_names) + number, after)
        self._write(np.array(ops), "", stream=Stream.HOST, num_bytes=num_bytes)

    def narrow(self, op: int, tensor: int, num_bytes: int) -> None:
        """Replace the result of an op by a version rounded to ``num_bytes``."""
        self._read(len(self._op_names), self.current(np.array([tensor])))
        self._make(np.array([tensor]), np.array([len(self._op_names)]), np.array([num_bytes]))
        self._write(np.array([op]), "@narrow")

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
        self.hold(self._add_tensors(names, sizes, producer))

    # ── copies ───────────────────────────────────────────────────────────────────────────────────

    def copy(
        self, name: str, stream: Stream, num_bytes: int, *, reads: Iterable[int], neighbor: int,
        phase: Phase = Phase.BACKWARD,
    ) -> int:  # fmt: skip
        """Write a copy to or from the host; return the control tensor that signals its end."""
        return self.signals([self._add_op(name, stream, num_bytes, reads, neighbor, phase)])[0]

    def reserve(self, tensors: Sequence[int], neighbor: int) -> list[int]:
        """Allocate memory, on the compute stream, for tensors that will be fetched into it."""
        waits, self._waiting = self._waiting, []
        names, new = self.graph.tensor_names, len(self._op_names)
        name = f"{names[tensors[0]]}@reserve:{new}"
        self._last = self._add_op(name, Stream.COMPUTE, 0, waits, neighbor, Phase.BACKWARD, parts=0)
        made: list[int] = self._add_tensors(
            [f"{names[t]}@reserve:{new}" for t in tensors], self.graph.tensor_bytes[[*tensors]],
            np.full(len(tensors), new),
        ).tolist()  # fmt: skip
        return made

    def fetch(
        self, name: str, tensors: Sequence[int], sizes: LongArray, *, reads: Iterable[int],
        neighbor: int, phase: Phase, buffer: int = _NONE,
    ) -> list[int]:  # fmt: skip
        """Copy these tensors from the host into new storages; return the new tensors.

        ``sizes`` are bytes by tensor number. The copies are in memory that is reserved already:
        in ``buffer`` if it is given, else in a staging buffer or slot of the whole step.
        """
        given = np.array(tensors, dtype=np.int64)
        new = self._add_op(name, Stream.COPY_IN, int(sizes[given].sum()), reads, neighbor, phase)
        # Parameters that share a storage, such as those of a cuDNN layer, are copied together.
        roots = np.array(list(dict.fromkeys(self.graph.root_of[given].tolist())), dtype=np.int64)
        self._fetched[roots] = self._add_tensors(
            self._names(roots), sizes[roots] * (buffer >= 0), np.full(len(roots), new),
            alias_of=buffer,
        )  # fmt: skip
        found: list[int] = self._fetched[roots].tolist()
        return found

    # ── tensors that exist before the step ───────────────────────────────────────────────────────

    def persistent(self, tensors: LongArray, sizes: LongArray) -> None:
        """Add tensors that exist before the step; ``sizes`` are bytes by tensor number."""
        self._make(tensors, np.full(len(tensors), _NONE), sizes[tensors])

    def lasting(self, name: str, num_bytes: int) -> int:
        """Reserve device memory for the whole step; return its tensor."""
        return int(self._add_tensors([name], num_bytes, np.array([_NONE]), Role.BUFFER)[0])

    # ── columns ──────────────────────────────────────────────────────────────────────────────────

    def _make(
        self, tensors: LongArray, producer: LongArray, num_bytes: LongArray,
        is_grown: BoolArray | None = None, grown: LongArray | None = None,
    ) -> None:  # fmt: skip
        """Add new versions of tensors; those in ``grown`` add to existing storages."""
        graph, role = self.graph, self._role[tensors]
        # The versions must be set first, because these tensors may be aliases of each other.
        new = len(self._tensor_names) + np.arange(len(tensors))
        self.now[tensors] = new
        base = graph.alias_of[tensors]
        is_alias = base >= 0
        alias_of = np.where(is_alias, self.current(np.maximum(base, 0)), _NONE)
        # A tensor that changes a fetched parameter in place is freed with the parameter.
        is_fetched = is_alias & (self._fetched[graph.root_of[np.maximum(base, 0)]] >= 0)
        if is_grown is not None:
            alias_of[is_grown], is_fetched = grown, is_fetched & ~is_grown
        role = np.where(is_fetched & self._is_persistent[role], int(Role.ACTIVATION), role)
        self._add_tensors(self._names(tensors), num_bytes, producer, role, alias_of)
        # Of several tensors in one storage, the last one counts as the latest.
        self._latest[graph.root_of[tensors]] = new

    def _write(
        self, ops: LongArray, suffix: str, *, parts: int = 1, is_recompute: bool = False,
        stream: Stream | None = None, num_bytes: LongArray | None = None,
    ) -> None:  # fmt: skip
        """Write copies of ops of the graph, or parts of them."""
        graph, new = self.graph, len(self._op_names) + np.arange(len(ops))
        if stream is None:
            self._read(int(new[0]), self._waiting)
            self._last, self._waiting = int(new[-1]), []
        self._op_names += [graph.op_names[op] + suffix for op in ops.tolist()]
        phase, partner = graph.op_phase[ops].astype(np.int64), graph.partner[ops]
        is_first = self._made_by[ops] < 0
        self._made_by[ops[is_first]] = new[is_first]
        streams = graph.op_stream[ops].astype(np.int64)
        self._ops.append(WrittenOps(
            origin=ops, neighbor=ops, num_parts=parts * self._is_done[ops],
            is_recompute=np.full(len(ops), is_recompute),
            phase=np.where(is_recompute & (phase == Phase.FORWARD), int(Phase.BACKWARD), phase),
            stream=streams if stream is None else np.full(len(ops), int(stream)),
            num_bytes=graph.bytes_touched[ops] // parts if num_bytes is None else num_bytes,
            partner=np.where(partner >= 0, self._made_by[np.maximum(partner, 0)], _NONE),
        ))  # fmt: skip

    def _add_op(
        self, name: str, stream: Stream, num_bytes: int, reads: Iterable[int], neighbor: int,
        phase: Phase, parts: int = 1,
    ) -> int:  # fmt: skip
        """Write an op that the given graph does not have."""
        one = (_NONE, neighbor, parts, False, int(phase), int(stream), num_bytes, _NONE)
        self._ops.append(WrittenOps(*(np.array([value]) for value in one)))
        self._read(len(self._op_names), list(reads))
        self._op_names.append(name)
        return len(self._op_names) - 1

    def _read(self, ops: int | LongArray, tensors: Sequence[int] | LongArray) -> None:
        """Let written ops read tensors: one op all of them, or each op one."""
        if len(tensors):
            self._reads.append(np.asarray(tensors, dtype=np.int64))
            self._readers.append(_column(ops, len(tensors)))

    def _add_tensors(
        self, names: list[str], num_bytes: int | LongArray, producer: LongArray,
        role: int | LongArray = Role.ACTIVATION, alias_of: int | LongArray = _NONE,
    ) -> LongArray:  # fmt: skip
        """Add tensors and return their numbers."""
        first = len(self._tensor_names)
        self._tensor_names += names
        self._producer += producer.tolist()
        given = num_bytes, producer, role, alias_of
        self._tensors.append(WrittenTensors(*(_column(each, len(names)) for each in given)))
        return first + np.arange(len(names))

    def _names(self, tensors: LongArray) -> list[str]:
        """Return names of new versions of tensors."""
        names, number = self.graph.tensor_names, self._number[tensors]
        self._number[tensors] = number + 1
        given = zip(tensors.tolist(), number.tolist(), strict=True)
        return [f"{names[t]}@{n}" if n else names[t] for t, n in given]

    # ── the graph ────────────────────────────────────────────────────────────────────────────────

    def finished(self, name: str) -> tuple[Graph, IntArray, FloatArray, LongArray, IntArray]:
        """Return the rewritten graph, and the other columns of `Rewritten`."""
        ops = WrittenOps(*map(np.concatenate, zip(*self._ops, strict=True)))
        tensors = WrittenTensors(*map(np.concatenate, zip(*self._tensors, strict=True)))
        readers = np.concatenate(self._readers)
        reads = np.concatenate(self._reads)[np.argsort(readers, kind="stable")]
        read_ptr = pointers(np.bincount(readers, minlength=len(ops.origin)))
        is_copy = ops.origin < 0
        graph = assemble(
            name, self._op_columns(ops, is_copy), TensorColumns(self._tensor_names, *tensors),
            read_ptr, reads, meta=self.graph.meta,
        )  # fmt: skip
        moved = np.where(is_copy, ops.num_bytes, 0)
        origin, neighbor = ops.origin.astype(np.int32), ops.neighbor.astype(np.int32)
        share = np.where(ops.num_parts > 0, 1.0 / np.maximum(ops.num_parts, 1), 0.0)
        return graph, origin, share, moved, neighbor

    def _op_columns(self, ops: WrittenOps, is_copy: BoolArray) -> OpColumns:
        given, source = self.graph, np.maximum(ops.origin, 0)
        count = np.maximum(ops.num_parts, 1)
        kinds = tuple(dict.fromkeys((*given.kinds, *_COPIES.values())))
        kind = given.op_kind[source].copy()
        for stream, name in _COPIES.items():
            kind[is_copy & (ops.stream == stream)] = kinds.index(name)
        # Recomputed ops and chunks draw the random numbers of the full op again.
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
            group=np.where(is_copy, _NONE, given.group[source]),
            rng_order=np.where(is_again, _NONE, given.rng_order[source]),
            stream=ops.stream,
            module=Interned(given.modules, given.op_module[ops.neighbor]),
            signature=Interned(
                given.signatures, np.where(is_copy | (count > 1), _NONE, given.op_signature[source])
            ),
        )


def _column(value: int | LongArray, count: int) -> LongArray:
    """Return a column of ``count`` entries from one value, or from one value for each."""
    return value if isinstance(value, np.ndarray) else np.full(count, int(value))
