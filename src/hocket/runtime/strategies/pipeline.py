"""Pipeline parallelism: every rank runs its segments of the traced step, as scheduled.

A batch is split into microbatches; the step is traced for one of them and cut into stages at any
op. Each rank executes its list of actions of a `Schedule` (1F1B, interleaved, zero bubble, …), and
sends each output as soon as its segment is done. A rank holds only the weights that its segments
use. Gradients of a weight that several ranks use are summed on the rank that owns the weight.

Torch's pipelining is not used: it keeps a copy of a tied weight on each stage without adding their
gradients, so that gpt2 trains differently by 1e-3 after five steps, and it needs models whose loss
is computed outside of them (measured: `benchmarks/runtime/torch_engines.py`). Here, replicas may
also have different numbers of stages.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_unflatten

from hocket.base.errors import UsageError
from hocket.capture.perform import draw_seed
from hocket.capture.recording import Ref
from hocket.graph.graph import Role
from hocket.plan.sections.schedule import LETTERS, Schedule, StageWork
from hocket.runtime.batches import Signature, settled, signature_of
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.eager_step import Slots
from hocket.runtime.model_tensors import ModelTensors
from hocket.runtime.ranks import PendingSends
from hocket.runtime.strategies.batch_split import microbatches
from hocket.runtime.strategies.parallel_task import ParallelTask, RankPart
from hocket.runtime.strategies.stage_cuts import Part, Segment
from hocket.runtime.strategies.stage_program import StageProgram, given_slots
from hocket.runtime.strategy import StepOutput, Strategy
from hocket.runtime.trace_options import Kind, Weight

Action = tuple[Segment, int]
"""A segment and its microbatch."""
OnGradient = Callable[[StageProgram, int, torch.Tensor], torch.Tensor]
"""Called with the complete gradient of a parameter; returns the tensor that now holds it."""


class SegmentMessage(NamedTuple):
    """Output of a segment for one microbatch, sent to one rank."""

    segment: Segment
    microbatch: int


class StageChannels:
    """Point-to-point messages between this rank of a pipeline and the other ranks.

    Messages between two ranks arrive in the order in which they were sent. The receiver knows this
    order from the sender's schedule. It stores the messages that arrive before the one that it
    waits for. Sending never blocks.
    """

    def __init__(
        self, ranks: Sequence[int], own: int, device: torch.device, groups: tuple[Any, Any]
    ) -> None:
        """``ranks`` are the global ranks of this pipeline, ``own`` is this rank's index in them.

        Each direction has a separate process group, because NCCL runs the messages between two
        ranks of a group one after the other: two ranks that both send first would deadlock.
        """
        self._ranks, self.own, self._device, self._groups = list(ranks), own, device, groups
        self._expected: dict[int, deque[tuple[SegmentMessage, int]]] = {}
        self._arrived: dict[tuple[int, SegmentMessage], torch.Tensor] = {}
        self.waited_s = 0.0
        """Seconds spent waiting for messages."""
        self._sends = PendingSends()

    def expect(self, src: int, messages: Sequence[tuple[SegmentMessage, int]]) -> None:
        """Announce the messages that a rank sends in a step, in order, with their bytes."""
        self._expected[src] = deque(messages)

    def send(self, dst: int, data: torch.Tensor) -> None:
        """Start to send bytes."""
        # The second group is for messages to later ranks.
        group = self._groups[self.own < dst]
        self._sends.put(dist.isend(data, self._ranks[dst], group=group), data)

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

    def flush(self) -> None:
        """Wait until all messages are sent."""
        self._sends.wait()


class Pipeline(Strategy):
    """Strategy of one rank of a pipeline."""

    def __init__(self, task: ParallelTask, part: RankPart, batch: Any) -> None:
        """``batch`` is the local batch of this replica."""
        mesh, seed = part.mesh, task.options.seed or 0
        assert part.pipeline is not None
        self._cuts, schedule = part.pipeline
        self._model, self._recipe, self._mesh = task.model, task.recipe, mesh
        self._count, self._max_shapes = task.count, task.options.max_shapes
        # Dropout masks differ between replicas; replica 0 draws as a single device would.
        self._seed = draw_seed(seed, 0, mesh.data_rank) if mesh.data_rank else seed
        self._own, self._sizes = mesh.pipeline_rank, tuple(part.microbatches)
        self._actions = [_actions(schedule, rank) for rank in range(schedule.num_devices)]
        self._programs: dict[tuple[Kind, Signature], StageProgram] = {}
        self.tensors: Mapping[str, torch.Tensor] = ModelTensors(task.model).tensors
        self.channels = StageChannels(mesh.pipeline_ranks, self._own, mesh.device, mesh.directions)
        traced = self._program("train", microbatches(batch, self._sizes, task.count)[0][0])
        numbers = {name: n for n, name in traced.program.names.items() if name in self.tensors}
        self._owner = {id(self.tensors[name]): traced.owner(n) for name, n in numbers.items()}
        readers = {name: traced.readers(n) for name, n in numbers.items()}
        self._needed = {
            id(tensor)
            for name, tensor in self.tensors.items()
            if not isinstance(tensor, nn.Parameter)
            or self._own in {*readers.get(name, ()), self.stage_of(tensor)}
        }
        """Ids of all buffers, and of the weights that this rank computes with or updates."""
        self._shared: list[tuple[str, int, list[int]]] = []
        """Name, owner and other readers of each weight that several ranks use."""
        for name, n in numbers.items():
            others = sorted(readers[name] - {traced.owner(n)})
            if others and traced.program.tensors[n].role == Role.PARAMETER:
                self._shared.append((name, traced.owner(n), others))
        self._reducer: GradientReducer | None = None

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        self._recipe.make_update(optimizer)

    def feed(self, reducer: GradientReducer) -> None:
        """Set the reducer, which gets gradients as the last microbatch computes them."""
        self._reducer = reducer

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run all microbatches forward and backward, in the order of the schedule."""
        batches, shares = microbatches(batch, self._sizes, self._count)
        programs = [self._program("train", each) for each in batches]
        weights = [weight * share for share in shares]
        run = self._run(programs, batches, self._actions, step, weights)
        self._add_gradients(programs[0], run.gradients)
        own = [loss * shares[microbatch] for microbatch, loss in run.losses.items()]
        total = torch.stack(own).sum(0) if own else None
        return StepOutput(self._from(programs[0], programs[0].program.outputs[0], total), None)

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
                tensor.data.copy_(self._received(owner, tensor))
        self.channels.flush()

    def stage_of(self, tensor: torch.Tensor) -> int:
        """Return the pipeline rank that updates a tensor of the model."""
        return self._owner.get(id(tensor), 0)

    def is_needed(self, tensor: torch.Tensor) -> bool:
        """True if this rank holds a tensor of the model."""
        return id(tensor) in self._needed

    def place_weights(self) -> None:
        """Move the weights of this rank to its device, and free those of other ranks."""
        for tensor in self.tensors.values():
            if self.is_needed(tensor):
                tensor.data = tensor.data.to(self._mesh.device)
            else:
                empty = nn.Parameter(
                    torch.empty_like(tensor, device="meta"), requires_grad=tensor.requires_grad
                )
                torch.utils.swap_tensors(tensor, empty)  # type: ignore[no-untyped-call]

    # ── parts of a step ──────────────────────────────────────────────────────────────────────

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

    def _run(
        self,
        programs: Sequence[StageProgram],
        batches: Sequence[Any],
        actions: Sequence[Sequence[Action]],
        step: int,
        weights: Sequence[Weight],
    ) -> SegmentRun:
        """Run the actions of this rank; ``actions`` are those of all ranks."""
        held = [
            given_slots(program, self._model, batch, self.tensors)
            for program, batch in zip(programs, batches, strict=True)
        ]
        run = SegmentRun(self.channels, programs, held, step, weights)
        run.on_gradient = self._take
        for src, of_rank in enumerate(actions):
            run.expect(src, of_rank)
        for segment, microbatch in actions[self._own]:
            run.do(segment, microbatch)
        self.channels.flush()
        return run

    def _take(self, traced: StageProgram, parameter: int, total: torch.Tensor) -> torch.Tensor:
        """Pass a complete gradient to the reducer, if gradients are summed over replicas."""
        reducer, is_own = self._reducer, traced.owner(parameter) == self._own
        if reducer is None or not reducer.is_enabled or not is_own:
            return total
        tensor: Any = self.tensors[traced.program.names[parameter]]
        return reducer.take(tensor, total)

    def _add_gradients(
        self, traced: StageProgram, gradients: Mapping[tuple[str, int], torch.Tensor]
    ) -> None:
        """Sum partial gradients on the ranks that update their parameters."""
        for parameter, parts in traced.addends.items():
            name, owner = traced.program.names[parameter], traced.owner(parameter)
            tensor = self.tensors[name]
            total: torch.Tensor | None = None
            for index, part in enumerate(parts):
                maker = traced.rank_of_op(traced.program.tensors[part].producer)
                # Every rank walks the same list in the same order, so sends and receives match.
                if self._own == maker != owner:
                    self.channels.send(owner, _bytes(gradients[name, index]))
                if self._own != owner:
                    continue
                own = gradients[name, index] if maker == owner else self._received(maker, tensor)
                total = own if total is None else total.add_(own)
            if total is None or tensor.grad is total:  # another rank or the reducer has it
                continue
            tensor.grad = total if tensor.grad is None else tensor.grad.add_(total)
        self.channels.flush()

    def _received(self, src: int, like: torch.Tensor) -> torch.Tensor:
        data = self.channels.receive_now(src, like.numel() * like.itemsize)
        return data.view(like.dtype).view(like.shape)

    def _from(self, traced: StageProgram, number: int, own: torch.Tensor | None) -> torch.Tensor:
        """Broadcast a tensor from the rank that computes it over the pipeline."""
        spec, owner = traced.program.tensors[number].layout, traced.owner(number)
        assert spec is not None
        if own is None or owner != self._own:
            own = torch.empty(spec.shape, dtype=spec.dtype, device=self._mesh.device)
        own = own.detach().contiguous()
        rank = self._mesh.pipeline_ranks[owner]
        dist.broadcast(own, rank, group=self._mesh.pipeline_group)
        return own

    def _use(self, kind: Kind, batch: Any) -> Any:
        """Return the outputs of a step without gradients."""
        batch = settled(batch)
        traced = self._program(kind, batch)
        stages = self._cuts.device_of_stage
        actions = [
            [(Segment(stage, Part.FORWARD), 0) for stage, rank in enumerate(stages) if rank == own]
            for own in range(len(self._actions))
        ]
        held = self._run([traced], [batch], actions, 1, [1.0]).held[0]

        def leaf(value: Any) -> Any:
            if not isinstance(value, Ref):
                return value
            if traced.program.tensors[value.number].producer < 0:
                return held[value.number]
            return self._from(traced, value.number, held[value.number])

        returned = traced.program.returned
        assert returned is not None
        return tree_unflatten([leaf(value) for value in returned.leaves], returned.form)


class SegmentRun:
    """One step on one rank; saves the tensors of each microbatch between its segments."""

    def __init__(
        self,
        channels: StageChannels,
        programs: Sequence[StageProgram],
        held: list[Slots],
        step: int,
        weights: Sequence[Weight],
    ) -> None:
        """``held`` has the tensors that exist before each microbatch."""
        self._channels, self._programs, self.held = channels, programs, held
        self._step, self._weights = step, weights
        self._arrived: set[SegmentMessage] = set()
        self.losses: dict[int, torch.Tensor] = {}
        self.gradients: dict[tuple[str, int], torch.Tensor] = {}
        """Gradients by name of the parameter and index of the part."""
        self._num_added: Counter[str] = Counter()
        """Number of microbatches summed, for each parameter whose gradient one stage computes."""
        self.on_gradient: OnGradient | None = None

    def expect(self, src: int, actions: Sequence[Action]) -> None:
        """Announce the messages of another rank, which follow from its ordered actions."""
        own = self._channels.own
        if src == own:
            return
        self._channels.expect(src, [
            (SegmentMessage(segment, m), bundle.num_bytes)
            for segment, m in actions
            if self._programs[m].rank_of_stage(segment.stage) == src
            and (bundle := self._programs[m].bundles.get(segment, {}).get(own)) is not None
        ])  # fmt: skip

    def do(self, segment: Segment, microbatch: int) -> None:
        """Run a segment: receive its inputs before, and send its outputs after it."""
        traced, slots = self._programs[microbatch], self._programs[microbatch].slots
        # Bound ops refer to this list object, so its contents are exchanged instead.
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
        """Fill slots that a segment needs; a hook for subclasses with non-resident weights."""

    def _end(self, traced: StageProgram, segment: Segment) -> None:
        """Clear slots after a segment."""

    def _receive(self, traced: StageProgram, message: SegmentMessage) -> None:
        # Several segments may read a bundle, which is sent once.
        if message in self._arrived:
            return
        self._arrived.add(message)
        src = traced.rank_of_stage(message.segment.stage)
        bundle = traced.bundles[message.segment][self._channels.own]
        for tensor, value in traced.unpacked(bundle, self._channels.receive(src, message)).items():
            traced.slots[tensor] = value

    def _take_results(self, traced: StageProgram, segment: Segment, microbatch: int) -> None:
        """Store the loss and the gradients that a segment has computed."""
        program, slots = traced.program, traced.slots
        if not program.gradients:
            return
        loss = slots[program.outputs[0]]
        if loss is not None:
            self.losses[microbatch] = loss.detach()
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
                    # Parts of a sum may share memory with other tensors; whole gradients do not.
                    is_own = is_free and len(parts) == 1
                    self.gradients[key] = value if is_own else value.clone()
                if is_free:
                    slots[part] = None
                if len(parts) == 1:
                    self._count(traced, parameter, key)

    def _count(self, traced: StageProgram, parameter: int, key: tuple[str, int]) -> None:
        """Call `on_gradient` once all microbatches have contributed to a gradient."""
        self._num_added[key[0]] += 1
        if self._num_added[key[0]] == len(self._programs) and self.on_gradient is not None:
            self.gradients[key] = self.on_gradient(traced, parameter, self.gradients[key])


_PARTS: Mapping[str, tuple[Part, ...]] = {
    "F": (Part.FORWARD,),
    "B": (Part.INPUT_GRADIENT, Part.WEIGHT_GRADIENT),
    "I": (Part.INPUT_GRADIENT,),
    "W": (Part.WEIGHT_GRADIENT,),
}
"""Parts of a stage's work, by the letter of a schedule's action."""


def _actions(schedule: Schedule, rank: int) -> list[Action]:
    """Return the segments of a rank with their microbatches, in order."""
    return [
        (Segment(int(schedule.stage[index]), part), int(schedule.microbatch[index]))
        for index in range(schedule.start[rank], schedule.start[rank + 1])
        for part in _PARTS[LETTERS[StageWork(int(schedule.work[index]))]]
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
