"""A rewritten step carried out call by call: the reference of memory plans, for a processor.

Every op of the rewritten graph is done when the simulator lets it begin, and what nobody reads any
more is dropped when its last reader ends: recorded calls, once or again, copies to the host and
back, updates at home. So the bytes that are held are those of the simulated curve, and the numbers
those of the recorded step. One thread does everything: it shows what a plan holds and computes, and
not how long that takes. O(ops + reads).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from runtime.executed_program import perform

from hocket.base.errors import UsageError
from hocket.capture.perform import draw_seed, seed_device
from hocket.capture.program import Program
from hocket.capture.storage import look_at, storage_bytes
from hocket.graph.graph import PERSISTENT_ROLES, Graph, Phase, Role, Stream
from hocket.hardware.allocation import aligned
from hocket.plan.sections import Memory
from hocket.runtime.offload.memory_tracker import MemoryTracker, on_host
from hocket.simulate.rewriting.host_parameters import NUM_STAGING_BUFFERS
from hocket.simulate.rewriting.step import BudgetedStep
from hocket.simulate.timeline import Timeline

_CPU = torch.device("cpu")


class DoneStep(NamedTuple):
    """What a step computed, and the most bytes that it held."""

    loss: float
    peak_bytes: int


class RewrittenSteps:
    """Steps of a recorded program under a memory plan; parameters and states go on from step to
    step."""

    def __init__(
        self,
        given: Graph,
        program: Program,
        memory: Memory,
        step: BudgetedStep,
        timeline: Timeline,
        values: Mapping[str, torch.Tensor],
        *,
        seed: int,
    ) -> None:
        """``given`` and ``program`` are what was recorded, ``timeline`` is that of ``step``, the
        step under ``memory``; ``values`` are parameters, buffers and the batch by name, which stay
        as they are."""
        _require_whole(step)
        self._given, self._program, self._graph = given, program, step.rewritten.graph
        self._origin, self._seed, self._num_steps = step.rewritten.origin, seed, 0
        self._events = list(_events(timeline))
        places = {"slots": 1 + max(1, memory.prefetch), "staging": NUM_STAGING_BUFFERS}
        self._num_places = {
            self._graph.tensor_names.index(name): count
            for name, count in places.items()
            if name in self._graph.tensor_names
        }
        """In how many places of each room what comes and goes takes turns."""
        self._num_fetches: Counter[int] = Counter()
        """How many have had their turn in each room."""
        names = {
            name: tensor
            for tensor, name in enumerate(given.tensor_names)
            if given.tensor_role[tensor] != Role.CONTROL
        }
        self._original = [_original(name, names) for name in self._graph.tensor_names]
        """Per tensor of the rewritten graph: that of the recorded one; -1 for none."""
        self._home = _storages(given, program, values)
        """Per storage: its bytes on the host."""
        self._here: dict[int, torch.Tensor] = {}
        """What lasts on the device, by tensor of the rewritten graph, in bytes."""
        for tensor in np.flatnonzero(self._graph.tensor_producer < 0).tolist():
            lies_in = int(self._graph.root_of[tensor])
            if lies_in not in self._here:
                self._here[lies_in] = self._placed(lies_in)
            self._here[tensor] = self._here[lies_in]
        self._readers = Counter(self._graph.reads.tolist())
        self._changed_at_home = self._updated_at_home()

    def _placed(self, tensor: int) -> torch.Tensor:
        """Room for something that lasts, with its numbers where it has some."""
        room = torch.zeros(int(self._graph.tensor_bytes[tensor]), dtype=torch.uint8)
        if (root := self._root(tensor)) >= 0:
            room[: len(self._home[root])] = self._home[root]
        return room

    def step(self) -> DoneStep:
        """One step, in the order and with the frees that were simulated."""
        self._num_steps += 1
        self._known: dict[int, torch.Tensor] = {}
        self._landed: dict[int, torch.Tensor] = {}
        self._left, losses = Counter(self._readers), list[float]()
        for tensor, data in self._here.items():
            self._known[tensor] = data
            root = self._root(tensor)
            if root in self._changed_at_home:
                # What the host has changed and the device keeps comes before its block begins.
                data[: len(self._home[root])] = self._home[root]
        tracker = MemoryTracker()
        with tracker, torch.enable_grad():
            tracker.track(self._here.values())
            for op, begins in self._events:
                if begins:
                    self._begin(op)
                    continue
                losses += self._end(op)
        return DoneStep(losses[0], tracker.peak_bytes)

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """Parameters, buffers and states by name, as they are at home or where they last."""
        lasting = {self._root(tensor): data for tensor, data in self._here.items()}
        found = {}
        for tensor, name in self._program.names.items():
            spec, root = self._program.tensors[tensor], int(self._given.root_of[tensor])
            if spec.role != Role.INPUT and spec.layout is not None:
                is_home = root in self._changed_at_home or root not in lasting
                found[name] = look_at((self._home if is_home else lasting)[root], spec.layout)
        return found

    def _root(self, tensor: int) -> int:
        """The recorded storage behind a tensor of the rewritten graph; -1 for none."""
        original = self._original[tensor]
        return int(self._given.root_of[original]) if original >= 0 else -1

    def _updated_at_home(self) -> set[int]:
        """Storages that updates on the host change."""
        ops = self._origin[np.flatnonzero(self._graph.op_stream == Stream.HOST)]
        tensors = {tensor for op in ops.tolist() for tensor in self._given.reads_of(op).tolist()}
        return {
            int(self._given.root_of[tensor])
            for tensor in tensors
            if self._given.tensor_role[tensor] in PERSISTENT_ROLES
        }

    # ── one op ───────────────────────────────────────────────────────────────────────────────────

    def _begin(self, op: int) -> None:
        stream, origin = int(self._graph.op_stream[op]), int(self._origin[op])
        if stream == Stream.HOST:
            self._update_at_home(origin)
        elif origin >= 0:
            self._call(op, origin)
        elif stream == Stream.COPY_OUT:
            self._send(op)
        elif stream == Stream.COPY_IN:
            self._fetch(op)
        else:
            for tensor in self._graph.made_by(op):
                size = int(self._graph.tensor_bytes[tensor])
                self._known[int(tensor)] = torch.empty(size, dtype=torch.uint8)

    def _end(self, op: int) -> Iterator[float]:
        """Drop what the op was the last to read; the loss is read as it is made."""
        made = [int(tensor) for tensor in self._graph.made_by(op)]
        for tensor in made:
            if self._graph.tensor_role[tensor] == Role.OUTPUT and tensor in self._known:
                with on_host():
                    yield float(self._known[tensor])
        reads = self._graph.reads_of(op).tolist()
        for tensor in reads:
            self._left[tensor] -= 1
        for tensor in (*reads, *made):
            lasts = self._graph.tensor_producer[tensor] < 0
            is_kept = self._graph.tensor_role[tensor] == Role.OUTPUT
            if not self._left[tensor] and not lasts and not is_kept:
                self._known.pop(tensor, None)

    def _call(self, op: int, origin: int) -> None:
        """A recorded call, the first time or again."""
        call, given = self._program.calls[origin], self._given
        at = {}
        for tensor in sorted(self._graph.reads_of(op).tolist()):
            # What was made or fetched last stands for a tensor.
            if self._original[tensor] >= 0:
                at[self._original[tensor]] = tensor
        known = {tensor: self._standing(tensor, at) for tensor in call.reads
                 if self._program.tensors[tensor].layout is not None}  # fmt: skip
        made = {self._original[int(t)]: int(t) for t in self._graph.made_by(op)}
        for target, written in zip(call.targets, call.written, strict=True):
            if written not in made and given.tensor_role[target] in PERSISTENT_ROLES:
                # Statistics move once.
                with on_host():
                    known[target] = known[target].clone()
        if origin in self._program.draws:
            draw = self._program.draws[origin]
            seed_device(_CPU, draw_seed(self._seed, self._num_steps, draw))
        perform(call, known, self._num_steps)
        for original, tensor in made.items():
            if original in known:
                self._known[tensor] = known[original]

    def _standing(self, tensor: int, at: Mapping[int, int]) -> torch.Tensor:
        """The tensor that a call reads: itself, or a look at the bytes that were fetched."""
        root = int(self._given.root_of[tensor])
        own, whole = at.get(tensor, -1), at.get(root, -1)
        found = max(own, whole) if self._is_fetched(whole) or own < 0 else own
        value = self._known[found]
        layout = self._program.tensors[tensor].layout
        assert layout is not None
        is_bytes = self._is_fetched(found) or self._graph.tensor_producer[found] < 0
        return look_at(value, layout) if is_bytes else value

    def _is_fetched(self, tensor: int) -> bool:
        producer = int(self._graph.tensor_producer[tensor]) if tensor >= 0 else -1
        return producer >= 0 and self._graph.op_stream[producer] == Stream.COPY_IN

    # ── copies and updates at home ───────────────────────────────────────────────────────────────

    def _send(self, op: int) -> None:
        """Activations or gradients, or home what was changed in a berth."""
        for tensor in self._graph.reads_of(op).tolist():
            original = self._original[tensor]
            if original < 0:
                continue
            if self._is_fetched(tensor):
                self._home[self._root(tensor)].copy_(self._known[tensor])
                continue
            size = self._program.tensors[original].storage_bytes
            with on_host():
                data = storage_bytes(self._known[tensor], size).clone()
            if self._graph.op_phase[op] == Phase.FORWARD:
                self._landed[int(self._given.root_of[original])] = data
            else:
                self._landed[original] = data

    def _fetch(self, op: int) -> None:
        """What was sent, into the room that was taken for it; what is at home, into a slot or a
        berth."""
        reads, start = self._graph.reads_of(op).tolist(), 0
        taking_turns = next((tensor for tensor in reads if tensor in self._num_places), -1)
        for tensor in map(int, self._graph.made_by(op)):
            root, room = self._root(tensor), int(self._graph.alias_of[tensor])
            if root < 0:
                continue
            if room >= 0:
                self._known[tensor] = self._known[room]
                self._known[tensor].copy_(self._landed.pop(root))
                continue
            data = self._home[root]
            self._known[tensor] = self._in_turn(taking_turns, start, len(data)).copy_(data)
            start += int(aligned(len(data)))
        self._num_fetches[taking_turns] += 1

    def _in_turn(self, room: int, start: int, num_bytes: int) -> torch.Tensor:
        """A part of the place whose turn it is."""
        buffer, count = self._here[room], self._num_places[room]
        first = self._num_fetches[room] % count * (len(buffer) // count) + start
        return buffer[first : first + num_bytes]

    def _update_at_home(self, origin: int) -> None:
        """A recorded update of what is at home, by gradients that have come."""
        call, known = self._program.calls[origin], dict[int, torch.Tensor]()
        for tensor in call.reads:
            layout = self._program.tensors[tensor].layout
            if layout is not None:
                root = int(self._given.root_of[tensor])
                is_home = self._given.tensor_role[tensor] in PERSISTENT_ROLES
                known[tensor] = look_at(
                    self._home[root] if is_home else self._landed[tensor], layout
                )
        with on_host():
            perform(call, known, self._num_steps)


def _require_whole(step: BudgetedStep) -> None:
    """Refuse plans whose ops are done in parts or with other numbers than they were recorded."""
    if (step.rewritten.share[step.rewritten.origin >= 0] < 1).any():
        raise UsageError(
            "a plan with a loss in chunks, with experts or large updates in parts or with rounded "
            "parameters is not carried out call by call",
            hint="carry it out by the model itself: --backend single",
        )


def _events(timeline: Timeline) -> Iterator[tuple[int, bool]]:
    """Ops as they begin (True) and end; at one instant ends come first."""
    start_s, end_s = timeline.op_start_s, timeline.op_end_s
    begins, ends = np.argsort(start_s, kind="stable"), np.argsort(end_s, kind="stable")
    at, begun = 0, np.zeros(len(start_s), dtype=np.bool_)
    for op in begins.tolist():
        while at < len(ends) and end_s[ends[at]] <= start_s[op] and begun[ends[at]]:
            yield int(ends[at]), False
            at += 1
        begun[op] = True
        yield op, True
    yield from ((op, False) for op in ends[at:].tolist())


def _original(name: str, known: Mapping[str, int]) -> int:
    """The recorded tensor that one of the rewritten graph was made of, by its name."""
    first, _, count = name.rpartition("@")
    return known.get(first if count.isdigit() and first in known else name, -1)


def _storages(
    given: Graph, program: Program, values: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """The bytes of what there is before a step, by recorded storage; states are zeros."""
    found: dict[int, torch.Tensor] = {}
    for tensor, name in program.names.items():
        spec, root = program.tensors[tensor], int(given.root_of[tensor])
        if spec.layout is None or root in found:
            continue
        if name in values:
            found[root] = storage_bytes(values[name], spec.storage_bytes).clone()
        else:
            found[root] = torch.zeros(spec.storage_bytes, dtype=torch.uint8)
    return found
