"""Pipeline parallelism: every rank runs its segments of the traced step, as scheduled.

A batch is split into microbatches; the step is traced for one of them and cut into stages. Each
rank executes its list of actions, which any schedule of the project can provide, and sends each
output as soon as its segment is done. Each weight is held only by the ranks that compute with it.

Not torch's pipelining: it keeps a copy of a tied weight on each stage and does not add their
gradients, so that gpt2 trains differently by 1e-3 after five steps, and it takes only models whose
loss is computed outside of them (measured: `benchmarks/runtime/torch_engines.py`). Stages here are
cut at any op, and replicas may have different numbers of stages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_unflatten

from hocket.base.errors import UsageError
from hocket.capture.fake import all_tensors
from hocket.capture.perform import draw_seed
from hocket.capture.recording import Ref
from hocket.graph.graph import Role
from hocket.plan.sections.schedule import LETTERS, Schedule, StageWork
from hocket.runtime.batches import Signature, settled, signature_of
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.eager_step import Slots
from hocket.runtime.model_tensors import ModelTensors
from hocket.runtime.strategies.batch_split import microbatches
from hocket.runtime.strategies.parallel_task import ParallelTask, RankPart
from hocket.runtime.strategies.stage_cuts import Part, Segment
from hocket.runtime.strategies.stage_program import PARTS_OF_ACTION, StageProgram
from hocket.runtime.strategy import Passes, StepOutput
from hocket.runtime.trace_options import Kind, Weight

_Action = tuple[Segment, int]
"""A segment and its microbatch."""

# Between two ranks messages arrive in the order in which they were sent. Both sides know the
# schedule of both, so a receiver takes what comes before the message that it waits for and keeps
# it. Sending never waits: data is kept until it has gone.


class SegmentMessage(NamedTuple):
    """Output of a segment for one microbatch, sent to one rank."""

    segment: Segment
    microbatch: int


class StageChannels:
    """Messages between this rank of a pipeline and the others."""

    def __init__(
        self, ranks: Sequence[int], own: int, device: torch.device, groups: tuple[Any, Any]
    ) -> None:
        """``ranks`` are the global ranks of this pipeline, ``own`` is this rank's index in them.

        Each direction has a process group of its own, since NCCL runs the messages between two
        ranks of a group one after the other: if both sent first, each would wait for the other to
        receive.
        """
        self._ranks, self.own, self._device, self._groups = list(ranks), own, device, groups
        self._expected: dict[int, deque[tuple[SegmentMessage, int]]] = {}
        self._arrived: dict[tuple[int, SegmentMessage], torch.Tensor] = {}
        self.waited_s = 0.0
        """Seconds spent waiting for messages."""
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()

    def expect(self, src: int, messages: Sequence[tuple[SegmentMessage, int]]) -> None:
        """Announce the messages that a rank sends in one step, in order, with their sizes in
        bytes."""
        self._expected[src] = deque(messages)

    def send(self, dst: int, data: torch.Tensor) -> None:
        """Start to send bytes."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        group = self._groups[self.own < dst]
        self._sent.append((dist.isend(data, self._ranks[dst], group=group), data))

    def receive(self, src: int, wanted: SegmentMessage) -> torch.Tensor:
        """Wait for a message and return its bytes."""
        while (src, wanted) not in self._arrived:
            message, num_bytes = self._expected[src].popleft()
            self._arrived[src, message] = self.receive_now(src, num_bytes)
        return self._arrived.pop((src, wanted))

    def receive_now(self, src: int, num_bytes: int) -> torch.Tensor:
        """Receive the next ``num_bytes`` from a rank, outside the schedule of a step."""
        data = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        began_s = time.perf_counter()
        dist.recv(data, self._ranks[src], group=self._groups[src < self.own])
        self.waited_s += time.perf_counter() - began_s
        return data

    def settle(self) -> None:
        """Wait until everything is sent."""
        while self._sent:
            self._sent.popleft()[0].wait()


class Pipeline(Passes):
    """One rank of a pipeline."""

    def __init__(self, task: ParallelTask, part: RankPart, batch: Any) -> None:
        """``batch`` is the local batch of this replica."""
        mesh, seed = part.mesh, task.options.seed or 0
        assert part.pipeline is not None
        self._cuts, schedule = part.pipeline
        self._model, self._recipe, self._mesh = task.model, task.recipe, mesh
        self._count, self._max_shapes = task.count, task.options.max_shapes
        # Replicas see other samples and draw other masks; the first draws as one device does.
        self._seed = draw_seed(seed, 0, mesh.data_rank) if mesh.data_rank else seed
        self._own, self._sizes = mesh.pipeline_rank, tuple(part.microbatches)
        self._actions = [_actions(schedule, rank) for rank in range(schedule.num_devices)]
        self._programs: dict[tuple[Kind, Signature], StageProgram] = {}
        self._held = ModelTensors(task.model)
        self.tensors: Mapping[str, torch.Tensor] = self._held.tensors
        self.channels = StageChannels(mesh.pipeline_ranks, self._own, mesh.device, mesh.directions)
        traced = self._program("train", microbatches(batch, self._sizes, task.count)[0][0])
        self._owner = self._owners(traced)
        self._shared = self._shared_parameters(traced)
        self._needed = self._needed_tensors(traced)
        self._reducer: GradientReducer | None = None

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        self._recipe.make_update(optimizer)

    def feed(self, reducer: GradientReducer) -> None:
        """Pass gradients to a reducer as the last microbatch computes them; see `FeedsReducer`."""
        self._reducer = reducer

    def _take(self, traced: StageProgram, parameter: int, total: torch.Tensor) -> torch.Tensor:
        """Pass a complete gradient to the reducer, if replicas sum it."""
        reducer, is_own = self._reducer, traced.owner(parameter) == self._own
        if reducer is None or not reducer.is_enabled or not is_own:
            return total
        tensor: Any = self.tensors[traced.program.names[parameter]]
        return reducer.take(tensor, total)

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run all microbatches forward and backward, in the order of the schedule."""
        batches, loss_weights = microbatches(batch, self._sizes, self._count)
        programs = [self._program("train", each) for each in batches]
        run = SegmentRun(self, programs, batches, step, [weight * part for part in loss_weights])
        run.on_gradient = self._take
        for src, actions in enumerate(self._actions):
            run.expect(src, actions)
        for segment, microbatch in self._actions[self._own]:
            run.do(segment, microbatch)
        self.channels.settle()
        self._add_gradients(programs[0], run.gradients)
        return StepOutput(self._loss(programs[0], run.losses, loss_weights), None)

    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss, without gradients."""
        kept = self._use("evaluate", batch)
        return StepOutput(kept["loss"], kept["returned"])

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs."""
        return self._use("predict", batch)

    def refresh(self) -> None:
        """Send updated weights to the other stages that use them."""
        for name, owner, readers in self._shared:
            tensor = self.tensors[name]
            if owner == self._own:
                for reader in readers:
                    self.channels.send(reader, _bytes(tensor))
            elif self._own in readers:
                data = self.channels.receive_now(owner, tensor.numel() * tensor.itemsize)
                tensor.data.copy_(data.view(tensor.dtype).view(tensor.shape))
        self.channels.settle()

    def stage_of(self, tensor: torch.Tensor) -> int:
        """Return the pipeline rank that updates a tensor of the model."""
        return self._owner.get(id(tensor), 0)

    # ── parts ────────────────────────────────────────────────────────────────────────────────

    def _program(self, kind: Kind, batch: Any) -> StageProgram:
        key = kind, signature_of(batch)
        if key not in self._programs:
            if sum(known == kind for known, _ in self._programs) >= self._max_shapes:
                raise UsageError(
                    f"batches of more than {self._max_shapes} shapes",
                    hint="fill them up with pad=hocket.PadTo(64), or raise max_shapes",
                )
            graph, program = self._recipe.trace(self._model, batch, kind)
            returned = program.returned.leaves if program.returned and kind != "train" else ()
            keep = frozenset(leaf.number for leaf in returned if isinstance(leaf, Ref))
            self._programs[key] = StageProgram(
                graph, program, self._cuts, self._own, self._mesh.device,
                seed=self._seed, keep=keep,
            )  # fmt: skip
        return self._programs[key]

    def given(self, traced: StageProgram, batch: Any) -> Slots:
        """Return slots with the tensors that exist before a microbatch: this rank's weights and the
        batch."""
        slots: Slots = [None] * len(traced.program.tensors)
        inputs = {n: t for n, role, t in all_tensors(self._model, batch) if role == Role.INPUT}
        for number, name in traced.program.names.items():
            if name in inputs:
                slots[number] = inputs[name].detach().to(self._mesh.device)
            elif name in self.tensors and not self.tensors[name].is_meta:
                slots[number] = self.tensors[name].detach()
        return slots

    def _owners(self, traced: StageProgram) -> dict[int, int]:
        return {
            id(self.tensors[name]): traced.owner(number)
            for number, name in traced.program.names.items()
            if name in self.tensors
        }

    def _shared_parameters(self, traced: StageProgram) -> list[tuple[str, int, list[int]]]:
        """Return name, owner and other readers of each weight that several ranks use."""
        found = []
        for number, name in traced.program.names.items():
            others = sorted(traced.readers(number) - {traced.owner(number)})
            if others and traced.program.tensors[number].role == Role.PARAMETER:
                found.append((name, traced.owner(number), others))
        return found

    def _needed_tensors(self, traced: StageProgram) -> set[int]:
        """Return ids of the tensors that this rank computes with or updates, and of all buffers."""
        number_of = {name: number for number, name in traced.program.names.items()}
        found = set()
        for name, tensor in self.tensors.items():
            number = number_of.get(name)
            readers = traced.readers(number) if number is not None else set()
            is_weight = isinstance(tensor, nn.Parameter)
            if not is_weight or self._own in readers or self.stage_of(tensor) == self._own:
                found.add(id(tensor))
        return found

    def is_needed(self, tensor: torch.Tensor) -> bool:
        """True if this rank holds a tensor of the model."""
        return id(tensor) in self._needed

    def settle(self) -> None:
        """Move the weights of this rank to its device, and free those of other ranks."""
        for tensor in self.tensors.values():
            if self.is_needed(tensor):
                tensor.data = tensor.data.to(self._mesh.device)
            else:
                empty = nn.Parameter(
                    torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad
                )
                torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]

    def _add_gradients(
        self, traced: StageProgram, gradients: Mapping[tuple[str, int], torch.Tensor]
    ) -> None:
        """Send partial gradients to the ranks that update their parameters, and add them there."""
        for parameter, parts in traced.addends.items():
            name, owner = traced.program.names[parameter], traced.owner(parameter)
            total: torch.Tensor | None = None
            for index, part in enumerate(parts):
                maker = traced.rank_of_op(traced.program.tensors[part].producer)
                own = gradients.get((name, index))
                if self._own == maker != owner:
                    assert own is not None
                    self.channels.send(owner, _bytes(own))
                elif self._own == owner != maker:
                    like = self.tensors[name]
                    data = self.channels.receive_now(maker, like.numel() * like.itemsize)
                    own = data.view(like.dtype).view(like.shape)
                if self._own == owner and own is not None:
                    total = own if total is None else total.add_(own)
            if total is not None:
                tensor = self.tensors[name]
                if tensor.grad is None:
                    tensor.grad = total
                elif tensor.grad is not total:  # else the reducer has it
                    tensor.grad.add_(total)
        self.channels.settle()

    def _loss(
        self,
        traced: StageProgram,
        losses: Mapping[int, torch.Tensor],
        loss_weights: Sequence[float],
    ) -> torch.Tensor:
        number = traced.program.outputs[0]
        spec = traced.program.tensors[number].layout
        assert spec is not None
        total = torch.zeros((), dtype=spec.dtype, device=self._mesh.device)
        for microbatch, loss in losses.items():
            total += loss.detach().reshape(()) * loss_weights[microbatch]
        return self._from(traced.owner(number), total)

    def _from(self, owner: int, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast a tensor of one rank over the pipeline."""
        rank = self._mesh.pipeline_ranks[owner]
        tensor = tensor.contiguous()
        dist.broadcast(tensor, rank, group=self._mesh.pipeline_group)
        return tensor

    def _use(self, kind: Kind, batch: Any) -> Any:
        batch = settled(batch)
        traced = self._program(kind, batch)
        run = SegmentRun(self, [traced], [batch], 1, [1.0])
        stages = self._cuts.device_of_stage
        orders = [
            [(Segment(stage, Part.FORWARD), 0) for stage, owner in enumerate(stages) if owner == r]
            for r in range(len(self._actions))
        ]
        for src, actions in enumerate(orders):
            run.expect(src, actions)
        for segment, microbatch in orders[self._own]:
            run.do(segment, microbatch)
        self.channels.settle()
        returned = traced.program.returned
        assert returned is not None
        leaves = [self._leaf(traced, run.held[0], leaf) for leaf in returned.leaves]
        return tree_unflatten(leaves, returned.form)

    def _leaf(self, traced: StageProgram, held: Slots, leaf: Any) -> Any:
        if not isinstance(leaf, Ref):
            return leaf
        owner, spec = traced.owner(leaf.number), traced.program.tensors[leaf.number].layout
        assert spec is not None
        if traced.program.tensors[leaf.number].producer < 0:
            return held[leaf.number]
        if owner == self._own:
            return self._from(owner, held[leaf.number].detach())
        return self._from(
            owner, torch.empty(spec.shape, dtype=spec.dtype, device=self._mesh.device)
        )


OnGradient = Callable[[StageProgram, int, torch.Tensor], torch.Tensor]
"""Called with the complete gradient of a parameter; returns the tensor that now holds it."""


class RunsSegments(Protocol):
    """Owner of a `SegmentRun`: provides its channels and the tensors that exist before a
    microbatch."""

    channels: StageChannels

    def given(self, traced: StageProgram, batch: Any) -> Slots:
        """Return slots with tensors that exist before a microbatch."""


class SegmentRun:
    """One step on one rank: the tensors of each microbatch between its segments."""

    def __init__(
        self,
        owner: RunsSegments,
        programs: Sequence[StageProgram],
        batches: Sequence[Any],
        step: int,
        weights: Sequence[Weight],
    ) -> None:
        self._programs, self._step, self._weights = programs, step, weights
        self._channels = owner.channels
        self.held = [owner.given(p, b) for p, b in zip(programs, batches, strict=True)]
        self._arrived: set[SegmentMessage] = set()
        self.losses: dict[int, torch.Tensor] = {}
        self.gradients: dict[tuple[str, int], torch.Tensor] = {}
        """Gradients by name of the parameter and index of the part."""
        self._num_added: dict[str, int] = {}
        """Number of microbatches already summed, for each parameter whose gradient one stage
        computes."""
        self.on_gradient: OnGradient | None = None

    def expect(self, src: int, actions: Sequence[_Action]) -> None:
        """Announce the actions of another rank in its order, and thus the messages that it
        sends."""
        if src == self._channels.own:
            return
        own = self._channels.own
        self._channels.expect(src, [
            (SegmentMessage(segment, m), bundle.num_bytes)
            for segment, m in actions
            if self._programs[m].rank_of_stage(segment.stage) == src
            and (bundle := self._programs[m].bundles.get(segment, {}).get(own)) is not None
        ])  # fmt: skip

    def do(self, segment: Segment, microbatch: int) -> None:
        """Run a segment: receive its inputs before, and send its outputs after it."""
        traced, slots = self._programs[microbatch], self._programs[microbatch].slots
        slots[:] = self.held[microbatch]
        for source in traced.sources.get(segment, ()):
            self._receive(traced, SegmentMessage(source, microbatch))
        self._begin(traced, segment)
        traced.weight = self._weights[microbatch]
        traced.draw = self._step * len(self._programs) + microbatch
        traced.run(segment, self._step)
        for dst, bundle in traced.bundles.get(segment, {}).items():
            self._channels.send(dst, traced.packed(bundle))
        traced.drop_after(segment, slots)
        self._take_results(traced, segment, microbatch)
        self._end(traced, segment)
        self.held[microbatch] = slots.copy()
        slots[:] = [None] * len(slots)

    def _begin(self, traced: StageProgram, segment: Segment) -> None:
        """Fill slots that a segment needs; by default nothing, because all weights are resident."""

    def _end(self, traced: StageProgram, segment: Segment) -> None:
        """Clear slots after a segment."""

    def _receive(self, traced: StageProgram, message: SegmentMessage) -> None:
        if message in self._arrived:
            return
        self._arrived.add(message)
        src = traced.rank_of_stage(message.segment.stage)
        bundle = traced.bundles[message.segment][self._channels.own]
        for tensor, value in traced.unpacked(bundle, self._channels.receive(src, message)).items():
            traced.slots[tensor] = value

    def _take_results(self, traced: StageProgram, segment: Segment, microbatch: int) -> None:
        program, slots = traced.program, traced.slots
        if not program.gradients:
            return
        loss = program.outputs[0]
        if slots[loss] is not None:
            self.losses[microbatch] = slots[loss]
        if segment.part == Part.FORWARD:
            return
        for parameter, parts in traced.addends.items():
            for index, part in enumerate(parts):
                value = slots[part]
                if value is None or traced.segments[program.tensors[part].producer] != segment:
                    continue
                key, is_free = (program.names[parameter], index), traced.is_free(part, segment)
                if key in self.gradients:
                    self.gradients[key] = self.gradients[key].add_(value)
                else:
                    # Parts of a sum may be one tensor with something else; whole gradients are not.
                    is_own = is_free and len(parts) == 1
                    self.gradients[key] = value if is_own else value.clone()
                if is_free:
                    slots[part] = None
                if len(parts) == 1:
                    self._count(traced, parameter, key)

    def _count(self, traced: StageProgram, parameter: int, key: tuple[str, int]) -> None:
        """Pass a gradient on once all microbatches have contributed to it."""
        self._num_added[key[0]] = self._num_added.get(key[0], 0) + 1
        if self._num_added[key[0]] == len(self._programs) and self.on_gradient is not None:
            self.gradients[key] = self.on_gradient(traced, parameter, self.gradients[key])


def _actions(schedule: Schedule, rank: int) -> list[_Action]:
    """Return the segments of a rank with their microbatches, in order."""
    found: list[_Action] = []
    for index in range(schedule.start[rank], schedule.start[rank + 1]):
        letter = LETTERS[StageWork(int(schedule.work[index]))]
        for part in PARTS_OF_ACTION[letter]:
            segment = Segment(int(schedule.stage[index]), part)
            found.append((segment, int(schedule.microbatch[index])))
    return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
