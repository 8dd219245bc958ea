"""The segments of a traced step that one pipeline rank runs.

Slots hold the tensors of one microbatch while one of its segments runs; between segments they are
saved per microbatch. Tensors that only one segment needs are released at their last use there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hocket.capture.program import Program
from hocket.graph.graph import Graph
from hocket.runtime.eager_step import BoundOp, OpCalls, Slots
from hocket.runtime.strategies.stage_cuts import (
    Part,
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
        """``own`` is this pipeline rank; ``keep`` are tensors that the rank that makes them must
        hold."""
        super().__init__(graph, program, device, seed)
        self._cuts, self._own = cuts, own
        num_stages = len(cuts.device_of_stage)
        forward_stages = cuts.forward_stages(graph, program)
        self.segments = segments_of(graph, program, forward_stages, num_stages)
        self.addends = shared_gradients(program, self.segments, cuts.device_of_stage)
        self._summed = {part for parts in self.addends.values() for part in parts}
        self._keep = keep | self._summed | {*program.outputs}
        self._left_out = self._adding_ops()
        self._readers = self._source_readers()
        self.bundles = self._bundles()
        self._sent = {
            tensor
            for by_rank in self.bundles.values()
            for bundle in by_rank.values()
            for tensor in bundle.tensors
        }
        self.sources = self._sources()
        """Segments of other ranks whose bundles a segment of this rank reads."""
        self._last = self._last_segments()
        self._bound = {
            segment: self._bound_of(segment, ops) for segment, ops in self._own_ops().items()
        }

    def rank_of_op(self, op: int) -> int:
        """Return the pipeline rank of an op; -1 for updates."""
        segment = self.segments[op]
        return -1 if segment is None else self._cuts.device_of_stage[segment.stage]

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that runs a stage."""
        return self._cuts.device_of_stage[stage]

    def owner(self, tensor: int) -> int:
        """Return the pipeline rank that computes a tensor, or else the one that reads it first."""
        producer = self.program.tensors[tensor].producer
        if producer >= 0:
            return self.rank_of_op(producer)
        return min(self.readers(tensor), default=0)

    def readers(self, tensor: int) -> set[int]:
        """Return the pipeline ranks that read a tensor that exists before the step, or a view of
        it."""
        return self._readers.get(self._identity(tensor), set())

    def _identity(self, tensor: int) -> tuple[str, int]:
        storage = self.program.tensors[tensor].storage
        return ("tensor", tensor) if storage < 0 else ("storage", storage)

    def _source_readers(self) -> dict[tuple[str, int], set[int]]:
        found: dict[tuple[str, int], set[int]] = {}
        for op, tensor in self._reads():
            if self.program.tensors[tensor].producer < 0:
                found.setdefault(self._identity(tensor), set()).add(self.rank_of_op(op))
        return found

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
        found: dict[int, torch.Tensor] = {}
        at = 0
        for tensor, whole in zip(bundle.tensors, bundle.is_whole, strict=True):
            spec = self.program.tensors[tensor]
            size = package_bytes(spec, whole)
            # Views of another type need addresses that are multiples of its size.
            found[tensor] = unpack(data[at : at + size].clone(), spec, whole)
            at += size
        return found

    # ── made once ────────────────────────────────────────────────────────────────────────────

    def _adding_ops(self) -> set[int]:
        """Return ops that only add partial gradients: these are added at the end of a step
        instead."""
        found: set[int] = set()
        for parameter, parts in self.addends.items():
            waiting = [self.program.gradients[parameter]]
            while waiting:
                tensor = waiting.pop()
                if tensor in parts:
                    continue
                op = self.program.tensors[tensor].producer
                found.add(op)
                waiting += [arg.number for arg in self.program.calls[op].args]
        return found

    def _own_ops(self) -> dict[Segment, list[int]]:
        found: dict[Segment, list[int]] = {}
        for op, segment in enumerate(self.segments):
            is_own = segment is not None and self.rank_of_op(op) == self._own
            if is_own and op not in self._left_out:
                assert segment is not None
                found.setdefault(segment, []).append(op)
        return found

    def _reads(self) -> list[tuple[int, int]]:
        """Return pairs (op, tensor) for every tensor with memory that an op reads."""
        return [
            (op, tensor)
            for op, call in enumerate(self.program.calls)
            if self.segments[op] is not None and op not in self._left_out
            for tensor in call.reads
            if self.program.tensors[tensor].layout is not None
        ]

    def _bundles(self) -> dict[Segment, dict[int, Bundle]]:
        """Return bundles by segment and receiving rank."""
        wanted: dict[tuple[Segment, int], dict[int, list[int]]] = {}
        for op, tensor in self._reads():
            producer = self.program.tensors[tensor].producer
            if producer < 0:
                continue
            reader, maker = self.rank_of_op(op), self.rank_of_op(producer)
            segment = self.segments[producer]
            if reader != maker and segment is not None:
                wanted.setdefault((segment, reader), {}).setdefault(tensor, []).append(op)
        found: dict[Segment, dict[int, Bundle]] = {}
        for (segment, reader), tensors in wanted.items():
            numbers = tuple(sorted(tensors))
            whole = tuple(needs_storage(self.program, t, tensors[t]) for t in numbers)
            size = sum(
                package_bytes(self.program.tensors[t], w)
                for t, w in zip(numbers, whole, strict=True)
            )
            found.setdefault(segment, {})[reader] = Bundle(numbers, whole, size)
        return found

    def _sources(self) -> dict[Segment, list[Segment]]:
        found: dict[Segment, list[Segment]] = {}
        for op, tensor in self._reads():
            producer = self.program.tensors[tensor].producer
            if producer < 0 or self.rank_of_op(op) != self._own:
                continue
            source, segment = self.segments[producer], self.segments[op]
            assert source is not None
            assert segment is not None
            known = found.setdefault(segment, [])
            if self.rank_of_op(producer) != self._own and source not in known:
                known.append(source)
        return found

    def _last_segments(self) -> dict[int, Segment | None]:
        """Map each tensor to the segment after which this rank can release it; None if that varies.

        The order of segments is fixed within a stage, but not between different stages of this
        rank.
        """
        users: dict[int, set[Segment]] = {}
        for op, tensor in self._reads():
            segment = self.segments[op]
            if self.rank_of_op(op) == self._own and segment is not None:
                users.setdefault(tensor, set()).add(segment)
        for segment, by_rank in self.bundles.items():
            if self._cuts.device_of_stage[segment.stage] == self._own:
                for bundle in by_rank.values():
                    for tensor in bundle.tensors:
                        users.setdefault(tensor, set()).add(segment)
        return {
            tensor: max(found) if len({s.stage for s in found}) == 1 else None
            for tensor, found in users.items()
        }

    def _bound_of(self, segment: Segment, ops: Sequence[int]) -> list[BoundOp]:
        sent = {
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
            if self.is_free(tensor, segment) and tensor not in self._keep and tensor not in sent:
                drops[position].append(tensor)
        return [
            BoundOp(self.bound(op, self._sent), op, tuple(dropped))
            for op, dropped in zip(ops, drops, strict=True)
        ]

    def is_free(self, tensor: int, segment: Segment) -> bool:
        """True if this rank can release a tensor after a segment."""
        return tensor not in self._last or self._last[tensor] == segment

    def drop_after(self, segment: Segment, held: Slots) -> None:
        """Release tensors that were only held to be sent after a segment."""
        for bundle in self.bundles.get(segment, {}).values():
            for tensor in bundle.tensors:
                if self._last.get(tensor) == segment and tensor not in self._keep:
                    held[tensor] = None


PARTS_OF_ACTION: dict[str, tuple[Part, ...]] = {
    "F": (Part.FORWARD,),
    "B": (Part.INPUT_GRADIENT, Part.WEIGHT_GRADIENT),
    "I": (Part.INPUT_GRADIENT,),
    "W": (Part.WEIGHT_GRADIENT,),
}
"""Parts of a stage's work, by the letter of a schedule's action."""
