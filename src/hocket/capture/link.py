"""Turn a recording into a Program: give every in-place write a new version, and order ops around
it.

An in-place write creates a new tensor number that aliases the written tensor. Later readers of the
storage read the newest version. Each earlier reader gets a control tensor of zero bytes as output,
which the writer reads, so that no reordering can move the reader behind the write. One pass in
recorded order, O(calls + reads).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hocket.capture.program import Call, Program, TensorSpec
from hocket.capture.recording import RawCall, Recording, Ref, Returned, map_tree
from hocket.graph import Role


@dataclass
class _Storage:
    """Writes and reads of one storage so far."""

    epoch: int = 0
    """Number of writes."""
    last_write: int = -1
    """Tensor made by the last write."""
    readers: list[int] = field(default_factory=list)
    """Calls that read the content since the last write."""


@dataclass
class _TensorEntry:
    """A tensor that has no final number yet."""

    value: int
    """-1 for tensors that exist only to order ops."""
    alias_of: int
    producer: int
    role: Role
    epoch: int


class _Linker:
    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.entries: list[_TensorEntry] = []
        self.current: dict[int, int] = {}
        self.storages = [_Storage() for _ in recording.storage_bytes]
        self.made: list[list[int]] = []
        self.controls: dict[int, int] = {}
        self.calls: list[Call] = []

    def link(self) -> Program:
        owner: dict[int, int] = {}
        for source in self.recording.sources:
            storage = self.recording.values[source.value].storage
            alias_of = owner.get(storage, -1)
            entry = self._add(source.value, alias_of, -1, source.role)
            owner.setdefault(storage, entry)
        for index, call in enumerate(self.recording.calls):
            self.made.append([])
            self.calls.append(self._call(index, call))
        return self._numbered()

    def _add(self, value: int, alias_of: int, producer: int, role: Role) -> int:
        epoch = 0
        if value >= 0:
            epoch = self.storages[self.recording.values[value].storage].epoch
            self.current[value] = len(self.entries)
        self.entries.append(_TensorEntry(value, alias_of, producer, role, epoch))
        if producer >= 0:
            self.made[producer].append(len(self.entries) - 1)
        return len(self.entries) - 1

    def _call(self, index: int, call: RawCall) -> Call:
        values = self.recording.values
        reads: dict[int, None] = {}
        base_of: dict[int, int] = {}
        before: dict[int, int] = {}
        for value in call.reads:
            tensor = before[value] = self.current[value]
            storage = values[value].storage
            state = self.storages[storage]
            reads[tensor] = None
            base_of.setdefault(storage, tensor)
            if self.entries[tensor].epoch < state.epoch:
                # The storage was written after this view was created: the call must run after the
                # write.
                reads[state.last_write] = None
        targets = tuple(self.current[value] for value in call.writes)
        written = tuple(self._write(index, value, reads) for value in call.writes)
        if not call.is_view:
            for storage in base_of:
                readers = self.storages[storage].readers
                if not readers or readers[-1] != index:
                    readers.append(index)
        outputs: list[int | None] = []
        for output in call.outputs:
            if output is None:
                outputs.append(None)
                continue
            if output not in self.current:
                self._add(output, base_of.get(values[output].storage, -1), index, Role.ACTIVATION)
            outputs.append(self.current[output])
        change = lambda leaf: Ref(before[leaf.number]) if isinstance(leaf, Ref) else leaf  # noqa: E731
        return Call(
            call.function, map_tree(call.args, change), map_tree(call.kwargs, change),
            tuple(outputs), targets, written, tuple(reads), call.phase, call.module, call.partner,
            call.draws, call.is_view, call.cost,
        )  # fmt: skip

    def _write(self, index: int, value: int, reads: dict[int, None]) -> int:
        """New version of a written value, ordered after all earlier readers of its storage."""
        state = self.storages[self.recording.values[value].storage]
        for reader in state.readers:
            # A reader whose result the writer reads precedes it anyway.
            if reader != index and not any(tensor in reads for tensor in self.made[reader]):
                reads[self._control(reader)] = None
        base = self.current[value]
        role = self.entries[base].role
        state.epoch += 1
        state.readers = []
        state.last_write = self._add(value, base, index, role)
        return state.last_write

    def _control(self, reader: int) -> int:
        if reader not in self.controls:
            self.controls[reader] = self._add(-1, -1, reader, Role.CONTROL)
        return self.controls[reader]

    # ── final numbers ────────────────────────────────────────────────────────────────────────

    def _numbered(self) -> Program:
        # The order of a Graph: tensors from before the step, then results in the order of calls.
        order = [t for t, entry in enumerate(self.entries) if entry.producer < 0]
        order += [tensor for made in self.made for tensor in made]
        rank = {tensor: number for number, tensor in enumerate(order)}
        self._hold(self.recording.outputs, Role.OUTPUT)
        self._hold(list(self.recording.gradients.values()), Role.GRADIENT)
        names = {rank[tensor]: source.name for tensor, source in enumerate(self.recording.sources)}
        first = {source.value: rank[t] for t, source in enumerate(self.recording.sources)}
        return Program(
            calls=tuple(_renumbered(call, rank) for call in self.calls),
            tensors=tuple(self._spec(self.entries[tensor], rank) for tensor in order),
            names=names,
            gradients={
                first[parameter]: rank[self.current[gradient]]
                for parameter, gradient in self.recording.gradients.items()
            },
            outputs=tuple(rank[self.current[value]] for value in self.recording.outputs),
            returned=self._returned(rank),
            repeats=self.recording.repeats,
            unseen=self.recording.unseen,
        )

    def _returned(self, rank: dict[int, int]) -> Returned | None:
        returned = self.recording.returned
        if returned is None:
            return None
        leaves = (
            Ref(rank[self.current[leaf.number]]) if isinstance(leaf, Ref) else leaf
            for leaf in returned.leaves
        )
        return Returned(returned.form, tuple(leaves))

    def _hold(self, values: list[int], role: Role) -> None:
        """Mark tensors and their storages as live until the end of the step."""
        for value in values:
            tensor = self.current[value]
            while tensor >= 0:
                entry = self.entries[tensor]
                is_end = entry.alias_of < 0 or tensor == self.current[value]
                if is_end and entry.role == Role.ACTIVATION:
                    entry.role = role
                tensor = entry.alias_of

    def _spec(self, entry: _TensorEntry, rank: dict[int, int]) -> TensorSpec:
        if entry.value < 0:
            return TensorSpec(None, -1, 0, entry.role, -1, entry.producer)
        storage, layout = self.recording.values[entry.value]
        alias_of = rank[entry.alias_of] if entry.alias_of >= 0 else -1
        size = self.recording.storage_bytes[storage]
        return TensorSpec(layout, storage, size, entry.role, alias_of, entry.producer)


def _renumbered(call: Call, rank: dict[int, int]) -> Call:
    change: Any = lambda leaf: Ref(rank[leaf.number]) if isinstance(leaf, Ref) else leaf  # noqa: E731
    return call._replace(
        args=map_tree(call.args, change),
        kwargs=map_tree(call.kwargs, change),
        outputs=tuple(None if tensor is None else rank[tensor] for tensor in call.outputs),
        targets=tuple(rank[tensor] for tensor in call.targets),
        written=tuple(rank[tensor] for tensor in call.written),
        reads=tuple(sorted(rank[tensor] for tensor in call.reads)),
    )


def link(recording: Recording) -> Program:
    """Program of a recording."""
    return _Linker(recording).link()
