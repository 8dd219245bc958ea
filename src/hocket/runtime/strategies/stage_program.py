"""The segments of a traced step that one pipeline rank runs.

`StageProgram` assigns ops to segments, binds the ops of this rank, and derives the messages that
segments of different ranks exchange. Slots hold the tensors of one microbatch while a segment runs;
between segments the tensors are saved per microbatch. A tensor that only one segment needs is
released at its last use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.capture.fake import all_tensors
from hocket.capture.program import Program
from hocket.graph.graph import Graph, Role
from hocket.runtime.eager_step import BoundOp, OpCalls, Slots
from hocket.runtime.strategies.stage_cuts import (
    Segment,
    StageCuts,
    segments_of,
    shared_gradients,
)
from hocket.runtime.tensor_bytes import needs_storage, pack, package_bytes, unpack


class Bundle(NamedTuple):
    """Tensors that one segment sends to one rank."""

    tensors: tuple[int, ...]
    is_whole: tuple[bool, ...]
    num_bytes: int


class StageProgram(OpCalls):
    """Segments of one program on one rank."""

    def __init__(
        self,
        graph: Graph,
        program: Program,
        cuts: StageCuts,
        own: int,
        device: torch.device,
        *,
        seed: int,
        keep: frozenset[int],
    ) -> None:
        """``own`` is this pipeline rank; ``keep`` lists tensors that are never released."""
        super().__init__(graph, program, device, seed)
        self._cuts, self._own = cuts, own
        num_stages = len(cuts.device_of_stage)
        forward_stages = cuts.forward_stages(graph, program)
        self.segments = segments_of(graph, program, forward_stages, num_stages)
        self.addends, self._left_out = shared_gradients(
            program, self.segments, cuts.device_of_stage
        )
        summed = {part for parts in self.addends.values() for part in parts}
        self._keep = keep | summed | {*program.outputs}
        self.sources: dict[Segment, list[Segment]] = {}
        """Segments of other ranks whose bundles a segment of this rank reads."""
        self.bundles: dict[Segment, dict[int, Bundle]] = {}
        """Tensors that each segment sends, by receiving rank."""
        self._readers: dict[tuple[str, int], set[int]] = {}
        """Ranks that read a tensor or storage that exists before the step."""
        self._users: dict[int, set[Segment]] = {}
        """Segments of this rank that read or send a tensor."""
        self._plan_messages()
        sent = {
            tensor
            for by_rank in self.bundles.values()
            for bundle in by_rank.values()
            for tensor in bundle.tensors
        }
        own_ops: dict[Segment, list[int]] = {}
        for op, segment in enumerate(self.segments):
            if segment is not None and self.rank_of_op(op) == own and op not in self._left_out:
                own_ops.setdefault(segment, []).append(op)
        self._bound = {
            segment: self._bound_of(segment, ops, sent) for segment, ops in own_ops.items()
        }

    def rank_of_op(self, op: int) -> int:
        """Return the pipeline rank of an op; -1 for updates."""
        segment = self.segments[op]
        return -1 if segment is None else self.rank_of_stage(segment.stage)

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that runs a stage."""
        return self._cuts.device_of_stage[stage]

    def owner(self, tensor: int) -> int:
        """Return the pipeline rank that computes a tensor; for inputs the lowest that reads it."""
        producer = self.program.tensors[tensor].producer
        if producer >= 0:
            return self.rank_of_op(producer)
        return min(self.readers(tensor), default=0)

    def readers(self, tensor: int) -> set[int]:
        """Return the pipeline ranks that read a tensor from before the step, or a view of it."""
        return self._readers.get(self._identity(tensor), set())

    def _identity(self, tensor: int) -> tuple[str, int]:
        storage = self.program.tensors[tensor].storage
        return ("tensor", tensor) if storage < 0 else ("storage", storage)

    def run(self, segment: Segment, step: int) -> None:
        """Run a segment on the tensors that are in the slots."""
        with self.as_traced():
            for do, op, drops in self._bound.get(segment, ()):
                self.perform(do, op, drops, step)

    def packed(self, bundle: Bundle) -> torch.Tensor:
        """Pack the tensors of a bundle into bytes."""
        parts = [
            pack(self.slots[t], self.program.tensors[t], whole)
            for t, whole in zip(bundle.tensors, bundle.is_whole, strict=True)
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()

    def unpacked(self, bundle: Bundle, data: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the tensors of a received bundle."""
        specs = [self.program.tensors[tensor] for tensor in bundle.tensors]
        sizes = list(map(package_bytes, specs, bundle.is_whole))
        # Cloned, because views of another dtype need addresses that are multiples of its size.
        return {
            tensor: unpack(part.clone(), spec, whole)
            for tensor, part, spec, whole in zip(
                bundle.tensors, torch.split(data, sizes), specs, bundle.is_whole, strict=True
            )
        }

    def is_free(self, tensor: int, segment: Segment) -> bool:
        """True if this rank can release a tensor after a segment."""
        users = self._users.get(tensor, {segment})
        # The order of segments is fixed within a stage, but not between stages of this rank.
        return len({user.stage for user in users}) == 1 and max(users) == segment

    def drop_after(self, segment: Segment, held: Slots) -> None:
        """Release tensors that were only held to be sent after a segment."""
        for bundle in self.bundles.get(segment, {}).values():
            for tensor in bundle.tensors:
                if self.is_free(tensor, segment) and tensor not in self._keep:
                    held[tensor] = None

    # ── made once ────────────────────────────────────────────────────────────────────────────

    def _reads(self) -> Iterator[tuple[int, Segment, int]]:
        """Yield (op, its segment, tensor) for every tensor with memory that an op reads."""
        for op, call in enumerate(self.program.calls):
            segment = self.segments[op]
            if segment is None or op in self._left_out:
                continue
            for tensor in call.reads:
                if self.program.tensors[tensor].layout is not None:
                    yield op, segment, tensor

    def _plan_messages(self) -> None:
        """Determine the readers of each tensor, and the bundles that segments send."""
        wanted: dict[tuple[Segment, int], dict[int, list[int]]] = {}
        for op, segment, tensor in self._reads():
            reader, producer = self.rank_of_op(op), self.program.tensors[tensor].producer
            if reader == self._own:
                self._users.setdefault(tensor, set()).add(segment)
            source = self.segments[producer] if producer >= 0 else None
            if source is None:
                self._readers.setdefault(self._identity(tensor), set()).add(reader)
            elif reader != self.rank_of_stage(source.stage):
                wanted.setdefault((source, reader), {}).setdefault(tensor, []).append(op)
                known = self.sources.setdefault(segment, [])
                if source not in known:
                    known.append(source)
        for (source, reader), tensors in wanted.items():
            numbers = tuple(sorted(tensors))
            whole = tuple(needs_storage(self.program, t, tensors[t]) for t in numbers)
            size = sum(
                package_bytes(self.program.tensors[t], w)
                for t, w in zip(numbers, whole, strict=True)
            )
            self.bundles.setdefault(source, {})[reader] = Bundle(numbers, whole, size)
            if self.rank_of_stage(source.stage) == self._own:
                for tensor in numbers:
                    self._users.setdefault(tensor, set()).add(source)

    def _bound_of(self, segment: Segment, ops: Sequence[int], sent: set[int]) -> list[BoundOp]:
        """Bind the ops of a segment, each with the tensors to release after it."""
        kept = self._keep | {
            tensor for bundle in self.bundles.get(segment, {}).values() for tensor in bundle.tensors
        }
        last_use: dict[int, int] = {}
        for position, op in enumerate(ops):
            call = self.program.calls[op]
            made = (t for t in call.outputs if t is not None)
            for tensor in (*call.reads, *made, *call.written):
                last_use[tensor] = position
        drops: list[list[int]] = [[] for _ in ops]
        for tensor, position in last_use.items():
            if self.is_free(tensor, segment) and tensor not in kept:
                drops[position].append(tensor)
        return [
            BoundOp(self.bound(op, sent), op, tuple(dropped))
            for op, dropped in zip(ops, drops, strict=True)
        ]


def given_slots(
    traced: StageProgram, model: nn.Module, batch: Any, tensors: Mapping[str, torch.Tensor]
) -> Slots:
    """Return slots with the batch and with ``tensors`` of the model, on the program's device."""
    inputs = {name: t for name, role, t in all_tensors(model, batch) if role == Role.INPUT}
    slots: Slots = [None] * len(traced.program.tensors)
    for number, name in traced.program.names.items():
        tensor = inputs.get(name, tensors.get(name))
        if tensor is not None and not tensor.is_meta:
            slots[number] = tensor.detach().to(traced.device)
    return slots
