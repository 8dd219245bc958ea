"""Write a graph op by op while tensors change their places: the pen of the rewrite.

Ops are those of a given graph, whole, again or in part, or copies to and from the host. A tensor is
named by its number in the given graph; what stands for it by now is kept beside: the first making,
a later one, or what was fetched for its whole storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.graph.build import OpColumns, TensorColumns, assemble
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role, Stream

if TYPE_CHECKING:
    from hocket.simulate.rewriting.chunks import Region

# As plain numbers: looking members of an enumeration up takes longer than all else here.
_FORWARD, _BACKWARD, _OPTIMIZER = map(int, (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
_ACTIVATION, _GRADIENT, _CONTROL = map(int, (Role.ACTIVATION, Role.GRADIENT, Role.CONTROL))
_PERSISTENT = frozenset(map(int, PERSISTENT_ROLES))


class _Op(NamedTuple):
    """An op that was written; what it has in common with the given one is added at the end."""

    name: str
    origin: int
    """The op of the given graph; -1 for copies."""
    beside: int
    """An op of the given graph where it runs."""
    num_parts: int
    """In how many parts the given op is done."""
    is_again: bool
    phase: int
    stream: int
    num_bytes: int
    """That it reads and writes, or moves."""
    partner: int


class _Tensor(NamedTuple):
    """A tensor that was written."""

    name: str
    num_bytes: int
    producer: int
    role: int
    alias_of: int


class Emitter:
    """Columns of the graph that is written, and what stands for each tensor of the given one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.now: dict[int, int] = {}
        self._fetched: dict[int, int] = {}
        self._latest: dict[int, int] = {}
        self._ops: list[_Op] = []
        self._reads: list[list[int]] = []
        self._tensors: list[_Tensor] = []
        self._number: dict[int, int] = {}
        """How often each tensor was made: its further makings get names of their own."""
        self._made_by: dict[int, int] = {}
        # Lists, because reading single entries of arrays takes most of the time otherwise.
        self._root: list[int] = graph.root_of.tolist()
        self._role: list[int] = graph.tensor_role.tolist()
        self._bytes: list[int] = graph.tensor_bytes.tolist()
        self._alias: list[int] = graph.alias_of.tolist()
        self._phase: list[int] = graph.op_phase.tolist()
        self._touched: list[int] = graph.bytes_touched.tolist()
        self._partner: list[int] = graph.partner.tolist()
        self._stream: list[int] = graph.op_stream.tolist()
        self._given_reads: list[int] = graph.reads.tolist()
        self._read_ptr: list[int] = graph.read_ptr.tolist()
        reader = np.repeat(self._phase, np.diff(graph.read_ptr))
        self._updating = set(graph.reads[reader == _OPTIMIZER].tolist())

    # ── what stands for a tensor ─────────────────────────────────────────────────────────────────

    def has(self, tensor: int) -> bool:
        """Whether something stands for a tensor."""
        return self._root[tensor] in self._fetched or tensor in self.now

    def stands_for(self, tensor: int) -> int:
        """What stands for a tensor now."""
        fetched = self._fetched.get(self._root[tensor])
        return self.now[tensor] if fetched is None else fetched

    def latest(self, storage: int) -> int:
        """The last tensor that was made in a storage."""
        return self._latest[storage]

    def forget(self, storages: Iterable[int]) -> None:
        """What was fetched for these storages is not read any more."""
        for storage in storages:
            self._fetched.pop(self._root[storage], None)

    # ── writing ──────────────────────────────────────────────────────────────────────────────────

    def op(
        self,
        op: int,
        *,
        suffix: str = "",
        is_again: bool = False,
        also_reads: Iterable[int] = (),
        tells: bool = False,
    ) -> int | None:
        """An op of the graph; with ``tells`` it makes a control tensor, which is returned."""
        new = self._like(op, suffix, [*self._reads_now(op), *also_reads], 1, is_again=is_again)
        for tensor in self.graph.made_by(op):
            if not (is_again and self._role[tensor] in _PERSISTENT):
                self.tensor(tensor, producer=new, num_bytes=self._bytes[tensor])
        return self.told(new) if tells else None

    def at_home(self, op: int, after: Iterable[int], num_bytes: int) -> None:
        """An update on the host, once copies have ended, that reads and writes so many bytes."""
        new = self._like(op, "", after, 1, is_again=False)
        self._ops[new] = self._ops[new]._replace(stream=int(Stream.HOST), num_bytes=num_bytes)

    def beside(self, op: int, number: int, count: int) -> int:
        """One of so many parts of an update on the device beside the computation, in turn with what
        is sent; returns what tells of its end."""
        suffix = f"@{number}" if count > 1 else ""
        new = self.part(op, 0, count, (), suffix=suffix, is_again=False)
        self._ops[new] = self._ops[new]._replace(stream=int(Stream.COPY_OUT))
        return self.told(new)

    def chunk(
        self, op: int, region: Region, chunk: int, count: int, *, tells: bool,
        also_reads: Iterable[int] = (),
    ) -> int | None:  # fmt: skip
        """A part of an op; what leaves the region is made whole and added to by later chunks."""
        if op in region.once:
            return self.op(op, tells=tells, also_reads=also_reads)
        new = self.part(
            op, chunk, count, region.whole, suffix=f"@{chunk}", is_again=chunk > 0,
            also_reads=also_reads,
        )  # fmt: skip
        return self.told(new) if tells else None

    def part(
        self, op: int, number: int, count: int, whole: Collection[int], *, suffix: str,
        is_again: bool, also_reads: Iterable[int] = (),
    ) -> int:  # fmt: skip
        """One of so many parts of an op, which is returned; storages of ``whole`` are made by the
        first part and added to by later ones, of others each part makes its own."""
        made = list(self.graph.made_by(op))
        grown = {t: self.now[t] for t in made if number and t in whole}
        reads = [*self._reads_now(op), *grown.values(), *also_reads]
        new = self._like(op, suffix, reads, count, is_again=is_again)
        for tensor in made:
            size = self._bytes[tensor]
            self.tensor(
                tensor, producer=new,
                num_bytes=size if self._root[tensor] in whole else -(-size // count),
                alias_of=grown.get(tensor),
            )  # fmt: skip
        return new

    def told(self, op: int) -> int:
        """The control tensor that tells of the end of an op that was written."""
        return self._add_tensor(f"{self._ops[op].name}@end", 0, op, _CONTROL, -1)

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
        num_bytes = int(sizes[list(tensors)].sum())
        new = self._copy(name, Stream.COPY_IN, num_bytes, reads, beside, phase)
        for tensor in tensors:
            root = self._root[tensor]
            self._fetched[root] = self._add_tensor(
                self._name(root), int(sizes[root]) * is_held, new, _ACTIVATION, -1
            )
        return [self._fetched[self._root[tensor]] for tensor in tensors]

    def tensor(
        self, tensor: int, *, producer: int, num_bytes: int, alias_of: int | None = None
    ) -> None:
        """A tensor of the graph, made by an op that was written, or there before the step."""
        role = self._role[tensor]
        if role == _GRADIENT and tensor in self._updating:
            # The update follows at once, and nobody else asks for it.
            role = _ACTIVATION
        if alias_of is None:
            base = self._alias[tensor]
            alias_of = self.stands_for(base) if base >= 0 else -1
            if base >= 0 and self._root[base] in self._fetched and role in _PERSISTENT:
                # What changes a parameter that was fetched leaves with it.
                role = _ACTIVATION
        new = self._add_tensor(self._name(tensor), num_bytes, producer, role, alias_of)
        self.now[tensor] = self._latest[self._root[tensor]] = new

    def lasting(self, name: str, num_bytes: int) -> int:
        """Room on the device that is there all the time."""
        return self._add_tensor(name, num_bytes, -1, int(Role.BUFFER), -1)

    def finished(self, name: str) -> tuple[Graph, IntArray, FloatArray, LongArray, IntArray]:
        """The graph, and the columns of `Rewritten` beside it."""
        turned: Any = zip(*self._ops, strict=True)
        columns: Any = _Op(*turned)
        origin, count = np.array(columns.origin, dtype=np.int32), np.array(columns.num_parts)
        is_copy, again = origin < 0, np.array(columns.is_again)
        num_bytes = np.array(columns.num_bytes, dtype=np.int64)
        graph = assemble(
            name,
            self._op_columns(columns, origin, count, is_copy, again),
            TensorColumns(*zip(*self._tensors, strict=True)),
            pointers([len(reads) for reads in self._reads]),
            [tensor for reads in self._reads for tensor in reads],
            meta=self.graph.meta,
        )
        moved = np.where(is_copy, num_bytes, 0)
        return graph, origin, 1.0 / count, moved, np.array(columns.beside, dtype=np.int32)

    def _op_columns(
        self, columns: Any, origin: IntArray, count: IntArray, is_copy: Any, is_again: Any
    ) -> OpColumns:
        given, source = self.graph, np.maximum(origin, 0)
        kinds = given.op_kind[source].tolist()
        signatures = np.where(is_copy | (count > 1), -1, given.op_signature[source]).tolist()
        copies = {int(Stream.COPY_IN): "copy.in", int(Stream.COPY_OUT): "copy.out"}
        return OpColumns(
            name=columns.name,
            kind=[
                copies[stream] if number < 0 else given.kinds[kind]
                for number, kind, stream in zip(columns.origin, kinds, columns.stream, strict=True)
            ],
            phase=columns.phase,
            dtype=np.where(is_copy, 0, given.op_dtype[source]),
            flops=np.where(is_copy, 0.0, given.flops[source] / count),
            bytes_touched=columns.num_bytes,
            workspace_bytes=np.where(is_copy, 0, -(-given.workspace_bytes[source] // count)),
            partner=columns.partner,
            group=np.where(is_copy, -1, given.group[source]),
            # What draws random numbers again draws the same ones.
            rng_order=np.where(is_copy | is_again, -1, given.rng_order[source]),
            stream=columns.stream,
            module=[given.module_of(op) for op in columns.beside],
            signature=[given.signatures[number] if number >= 0 else "" for number in signatures],
        )

    # ── columns ──────────────────────────────────────────────────────────────────────────────────

    def _reads_now(self, op: int) -> Iterator[int]:
        given = self._given_reads[self._read_ptr[op] : self._read_ptr[op + 1]]
        return map(self.stands_for, given)

    def _like(
        self, op: int, suffix: str, reads: Iterable[int], count: int, *, is_again: bool
    ) -> int:
        phase = self._phase[op]
        new = self._add_op(reads, _Op(
            self.graph.op_names[op] + suffix, op, op, count, is_again,
            _BACKWARD if is_again and phase == _FORWARD else phase,
            self._stream[op], self._touched[op] // count,
            self._made_by.get(self._partner[op], -1),
        ))  # fmt: skip
        self._made_by.setdefault(op, new)
        return new

    def _copy(
        self, name: str, stream: Stream, num_bytes: int, reads: Iterable[int], beside: int,
        phase: Phase,
    ) -> int:  # fmt: skip
        return self._add_op(
            reads, _Op(name, -1, beside, 1, False, int(phase), int(stream), num_bytes, -1)
        )

    def _add_op(self, reads: Iterable[int], op: _Op) -> int:
        self._ops.append(op)
        self._reads.append(list(dict.fromkeys(reads)))
        return len(self._reads) - 1

    def _name(self, tensor: int) -> str:
        count = self._number.get(tensor, 0)
        self._number[tensor] = count + 1
        return self.graph.tensor_names[tensor] + (f"@{count}" if count else "")

    def _add_tensor(
        self, name: str, num_bytes: int, producer: int, role: int, alias_of: int
    ) -> int:
        self._tensors.append(_Tensor(name, num_bytes, producer, role, alias_of))
        return len(self._tensors) - 1
