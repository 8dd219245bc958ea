"""Write a graph op by op while tensors change their places: the pen of the rewrite.

Ops are those of a given graph, whole, again or in part, or copies to and from the host. A tensor is
named by its number in the given graph; what stands for it by now is kept beside: the first making,
a later one, or what was fetched for its whole storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.graph.build import OpColumns, TensorColumns, assemble
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role, Stream

if TYPE_CHECKING:
    from hocket.simulate.rewriting.chunks import Region

_OP_COLUMNS = ("name", "kind", "phase", "dtype", "flops", "bytes_touched", "workspace_bytes",
               "group", "rng_order", "stream", "module", "signature", "origin", "share",
               "moved_bytes", "beside", "partner")  # fmt: skip
_OWN_COLUMNS = ("origin", "share", "moved_bytes", "beside")
"""Columns that are no graph's."""


class Emitter:
    """Columns of the graph that is written, and what stands for each tensor of the given one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.now: dict[int, int] = {}
        self._fetched: dict[int, int] = {}
        self._latest: dict[int, int] = {}
        self._ops: dict[str, list[Any]] = {name: [] for name in _OP_COLUMNS}
        self._reads: list[list[int]] = []
        self._tensors: dict[str, list[Any]] = {
            name: [] for name in ("name", "bytes", "producer", "role", "alias_of")
        }
        self._number: dict[int, int] = {}
        """How often each tensor was made: its further makings get names of their own."""
        self._made_by: dict[int, int] = {}
        updates = np.flatnonzero(graph.op_phase == Phase.OPTIMIZER)
        self._updating = {
            int(tensor) for op in updates.tolist() for tensor in graph.reads_of(op).tolist()
        }
        root = graph.root_of.tolist()
        self._root = root

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
        graph = self.graph
        reads = [self.stands_for(t) for t in graph.reads_of(op).tolist()]
        new = self._like(op, suffix, [*reads, *also_reads], 1, is_again=is_again)
        for tensor in graph.made_by(op):
            if not (is_again and graph.tensor_role[tensor] in PERSISTENT_ROLES):
                self.tensor(tensor, producer=new, num_bytes=int(graph.tensor_bytes[tensor]))
        return self._control(new) if tells else None

    def at_home(self, op: int, after: int, num_bytes: int) -> int:
        """An update on the host, once a copy has ended, that reads and writes so many bytes;
        returns what tells of its own end."""
        new = self._like(op, "", [after], 1, is_again=False)
        self._ops["stream"][new] = Stream.HOST
        self._ops["bytes_touched"][new] = num_bytes
        return self._control(new)

    def chunk(self, op: int, region: Region, chunk: int, count: int, *, tells: bool) -> int | None:
        """A part of an op; what leaves the region is made whole and added to by later chunks."""
        graph = self.graph
        if op in region.once:
            return self.op(op, tells=tells)
        made = list(graph.made_by(op))
        grown = {t: self.now[t] for t in made if chunk and t in region.whole}
        reads = [*map(self.stands_for, graph.reads_of(op).tolist()), *grown.values()]
        new = self._like(op, f"@{chunk}", reads, count, is_again=chunk > 0)
        for tensor in made:
            is_whole = self._root[tensor] in region.whole
            size = int(graph.tensor_bytes[tensor])
            self.tensor(
                tensor, producer=new, num_bytes=size if is_whole else -(-size // count),
                alias_of=grown.get(tensor),
            )  # fmt: skip
        return self._control(new) if tells else None

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
        return self._control(self._copy(name, stream, num_bytes, reads, beside, phase))

    def fetch(
        self, name: str, tensors: Sequence[int], sizes: LongArray, *, reads: Iterable[int],
        beside: int,
    ) -> None:  # fmt: skip
        """A copy from the host that stands for the storages of these tensors from now on; how many
        bytes each has is in ``sizes``, by its number."""
        phase = Phase(int(self.graph.op_phase[beside]))
        num_bytes = int(sizes[list(tensors)].sum())
        new = self._copy(name, Stream.COPY_IN, num_bytes, reads, beside, phase)
        for tensor in tensors:
            root = self._root[tensor]
            self._fetched[root] = self._add_tensor(
                self._name(root), int(sizes[root]), new, Role.ACTIVATION, -1
            )

    def tensor(
        self, tensor: int, *, producer: int, num_bytes: int, alias_of: int | None = None
    ) -> None:
        """A tensor of the graph, made by an op that was written, or there before the step."""
        graph = self.graph
        role = Role(int(graph.tensor_role[tensor]))
        if role == Role.GRADIENT and tensor in self._updating:
            # The update follows at once, and nobody else asks for it.
            role = Role.ACTIVATION
        if alias_of is None:
            base = int(graph.alias_of[tensor])
            alias_of = self.stands_for(base) if base >= 0 else -1
            if base >= 0 and self._root[base] in self._fetched and role in PERSISTENT_ROLES:
                # What changes a parameter that was fetched leaves with it.
                role = Role.ACTIVATION
        new = self._add_tensor(self._name(tensor), num_bytes, producer, role, alias_of)
        self.now[tensor] = self._latest[self._root[tensor]] = new

    def finished(self, name: str) -> tuple[Graph, IntArray, FloatArray, LongArray, IntArray]:
        """The graph, and the columns of `Rewritten` beside it."""
        columns = {key: value for key, value in self._ops.items() if key not in _OWN_COLUMNS}
        graph = assemble(
            name,
            OpColumns(**columns),
            TensorColumns(**self._tensors),
            pointers([len(reads) for reads in self._reads]),
            [tensor for reads in self._reads for tensor in reads],
            meta=self.graph.meta,
        )
        return (
            graph,
            np.array(self._ops["origin"], dtype=np.int32),
            np.array(self._ops["share"], dtype=np.float64),
            np.array(self._ops["moved_bytes"], dtype=np.int64),
            np.array(self._ops["beside"], dtype=np.int32),
        )

    # ── columns ──────────────────────────────────────────────────────────────────────────────────

    def _like(
        self, op: int, suffix: str, reads: Iterable[int], count: int, *, is_again: bool
    ) -> int:
        graph = self.graph
        signature = int(graph.op_signature[op])
        partner = int(graph.partner[op])
        new = self._add_op(
            reads,
            name=graph.op_names[op] + suffix,
            kind=graph.kind_of(op),
            phase=Phase.BACKWARD
            if is_again and graph.op_phase[op] == Phase.FORWARD
            else int(graph.op_phase[op]),
            dtype=int(graph.op_dtype[op]),
            flops=float(graph.flops[op]) / count,
            bytes_touched=int(graph.bytes_touched[op]) // count,
            workspace_bytes=-(-int(graph.workspace_bytes[op]) // count),
            group=int(graph.group[op]),
            # What draws random numbers again draws the same ones.
            rng_order=-1 if is_again else int(graph.rng_order[op]),
            stream=int(graph.op_stream[op]),
            module=graph.module_of(op),
            signature=graph.signatures[signature] if signature >= 0 and count == 1 else "",
            origin=op,
            share=1.0 / count,
            moved_bytes=0,
            beside=op,
            partner=self._made_by.get(partner, -1),
        )
        self._made_by.setdefault(op, new)
        return new

    def _copy(
        self, name: str, stream: Stream, num_bytes: int, reads: Iterable[int], beside: int,
        phase: Phase,
    ) -> int:  # fmt: skip
        return self._add_op(
            reads, name=name, kind="copy.in" if stream == Stream.COPY_IN else "copy.out",
            phase=phase, dtype=0, flops=0.0, bytes_touched=num_bytes, workspace_bytes=0, group=-1,
            rng_order=-1, stream=stream, module=self.graph.module_of(beside), signature="",
            origin=-1, share=1.0, moved_bytes=num_bytes, beside=beside, partner=-1,
        )  # fmt: skip

    def _add_op(self, reads: Iterable[int], **columns: Any) -> int:
        for name, values in self._ops.items():
            values.append(columns[name])
        self._reads.append(list(dict.fromkeys(reads)))
        return len(self._reads) - 1

    def _control(self, op: int) -> int:
        name = f"{self._ops['name'][op]}@end"
        return self._add_tensor(name, 0, op, Role.CONTROL, -1)

    def _name(self, tensor: int) -> str:
        count = self._number.get(tensor, 0)
        self._number[tensor] = count + 1
        return self.graph.tensor_names[tensor] + (f"@{count}" if count else "")

    def _add_tensor(
        self, name: str, num_bytes: int, producer: int, role: Role, alias_of: int
    ) -> int:
        values = {
            "name": name, "bytes": num_bytes, "producer": producer, "role": role,
            "alias_of": alias_of,
        }  # fmt: skip
        for key, value in values.items():
            self._tensors[key].append(value)
        return len(self._tensors["name"]) - 1
