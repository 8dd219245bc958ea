"""Round-robin pipeline schedule: model-parallel waves of Wavelet, every rank runs every partition.

Rank (w + s) mod N runs partition s of wave w. A step has 2N slots, N forward and N backward; in
each, all ranks run the same partition, each for another wave. Activations of a wave stay on the
rank that computed them until the backward pass; outputs are sent to the next rank, gradients of
inputs to the previous one. Every rank keeps master copies of all parameters on its host, and at
most two partitions on its device: the current slot's, and the next one, which is prefetched. After
the backward slot of a partition its gradients are summed over all ranks, concurrently with the
following slots. Every rank then runs the same optimizer update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.fake import all_tensors
from hocket.capture.program import Program
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.sections import Parallel
from hocket.runtime.batches import Signature, signature_of
from hocket.runtime.eager_step import Slots
from hocket.runtime.offload.copy_streams import CopyEvent, CopyStreams
from hocket.runtime.strategies.batch_split import microbatches
from hocket.runtime.strategies.parallel_task import ParallelTask, agree_on_model
from hocket.runtime.strategies.pipeline import SegmentRun, StageChannels
from hocket.runtime.strategies.stage_cuts import Part, Segment, cut_at_ops
from hocket.runtime.strategies.stage_program import StageProgram
from hocket.runtime.strategy import StepOutput, Strategy
from hocket.runtime.trace_options import Weight

_BACKWARD = (Part.INPUT_GRADIENT, Part.WEIGHT_GRADIENT)


def round_robin_slots(num_ranks: int, rank: int) -> list[tuple[int, int, bool]]:
    """Return for each slot: the partition, this rank's wave, and True for a backward pass."""
    stages = [*range(num_ranks), *reversed(range(num_ranks))]
    return [
        (stage, (rank - stage) % num_ranks, slot >= num_ranks) for slot, stage in enumerate(stages)
    ]


class RoundRobinProgram(StageProgram):
    """The segments of one wave on this rank; each segment makes its own views of parameters."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        program = self.program
        parameters = {
            number for number, spec in enumerate(program.tensors)
            if spec.role == Role.PARAMETER and spec.producer < 0
        }  # fmt: skip
        stored = {program.tensors[number].storage for number in parameters} - {-1}
        self.views: list[set[int]] = [set() for _ in self._cuts.device_of_stage]
        """Views of parameters that each stage's forward makes; other stages receive copies."""
        for number, spec in enumerate(program.tensors):
            maker = self.segments[spec.producer] if spec.producer >= 0 else None
            if maker is not None and maker.part == Part.FORWARD and spec.storage in stored:
                self.views[maker.stage].add(number)
        self.parameters: list[dict[int, str]] = [{} for _ in self._cuts.device_of_stage]
        """The parameters that each stage computes with, and their names."""
        by_storage = {program.tensors[n].storage: n for n in parameters if n in program.names}
        for op, tensor in self._reads():
            segment, spec = self.segments[op], program.tensors[tensor]
            root = tensor if tensor in parameters else by_storage.get(spec.storage, -1)
            if segment is not None and root in program.names:
                self.parameters[segment.stage][root] = program.names[root]

    def look_again(self, stage: int) -> None:
        """Make the views of parameters again after a partition was fetched again."""
        for do, op, _ in self._bound.get(Segment(stage, Part.FORWARD), ()):
            if any(made in self.views[stage] for made in self.program.calls[op].outputs):
                do()


@dataclass(frozen=True, eq=False)
class _Fetched:
    tensors: dict[str, torch.Tensor]
    ticket: CopyEvent


class PartitionPrefetch:
    """Parameters of the partitions that are on the device: at most two at a time."""

    def __init__(self, engines: CopyStreams, host: Mapping[str, torch.Tensor]) -> None:
        self._engines, self._host = engines, host
        self._here: dict[int, _Fetched] = {}

    def fetch(self, stage: int, names: Sequence[str]) -> None:
        """Start to copy a partition to the device, unless it is resident."""
        if stage in self._here:
            return
        pairs = []
        for name in names:
            source = self._host[name].detach()
            pairs.append((torch.empty_like(source, device=self._engines.device), source))
        ticket = self._engines.fetch(pairs)
        found = {name: target for name, (target, _) in zip(names, pairs, strict=True)}
        self._here[stage] = _Fetched(found, ticket)

    def use(self, stage: int) -> dict[str, torch.Tensor]:
        """Wait for a fetched partition and return its parameters."""
        found = self._here[stage]
        found.ticket.wait()
        return found.tensors

    def leave(self, stage: int) -> None:
        """Release a partition that is not needed any more."""
        self._here.pop(stage, None)


class _RoundRobinRun(SegmentRun):
    """One training step on this rank."""

    def __init__(
        self, owner: RoundRobinPipeline, programs: Sequence[RoundRobinProgram], *args: Any
    ) -> None:
        super().__init__(owner, programs, *args)
        self._owner = owner

    def _begin(self, stage_program: StageProgram, segment: Segment) -> None:
        assert isinstance(stage_program, RoundRobinProgram)
        here = self._owner.partitions.use(segment.stage)
        for number, name in stage_program.parameters[segment.stage].items():
            stage_program.slots[number] = here[name]
        if segment.part != Part.FORWARD:
            stage_program.look_again(segment.stage)

    def _end(self, stage_program: StageProgram, segment: Segment) -> None:
        assert isinstance(stage_program, RoundRobinProgram)
        for number in (
            *stage_program.parameters[segment.stage],
            *stage_program.views[segment.stage],
        ):
            stage_program.slots[number] = None


class RoundRobinPipeline(Strategy):
    """One rank of a round-robin pipeline."""

    def __init__(self, task: ParallelTask, planned: Graph, shares: Parallel) -> None:
        self._task, self._recipe = task, task.recipe
        self.predicted_s = task.predicted_s
        self._own, self._count = dist.get_rank(), dist.get_world_size()
        if self._count != len(shares.replicas):
            raise UsageError(
                f"the plan takes {len(shares.replicas)} ranks, and {self._count} are running",
                hint="start one per device: hocket launch plan.json script.py",
            )
        agree_on_model(task.model, task.device)
        cut = cut_at_ops(planned, shares.replicas[0].cuts)
        self._cuts = [
            cut._replace(
                device_of_stage=tuple((wave + s) % self._count for s in range(self._count))
            )
            for wave in range(self._count)
        ]
        self._sizes = [replica.num_samples for replica in shares.replicas]
        self._programs: dict[tuple[int, Signature], RoundRobinProgram] = {}
        self._whole: Strategy = task.on_one_device(task.batch, task.options.seed)
        self.tensors: Mapping[str, torch.Tensor] = self._whole.tensors
        engines = CopyStreams(task.device, is_real=task.device.type == "cuda")
        self.partitions = PartitionPrefetch(engines, self.tensors)
        groups = (dist.new_group(), dist.new_group())
        self.channels = StageChannels(range(self._count), self._own, task.device, groups)
        self._sums = dist.new_group()

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, with the same gradients on every rank."""
        self._recipe.make_update(optimizer)

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run all waves forward and backward; in each slot this rank runs one partition of one
        wave."""
        batches, shares = microbatches(batch, self._sizes, self._task.count)
        programs = [self._program(wave, each) for wave, each in enumerate(batches)]
        run = _RoundRobinRun(self, programs, batches, step, [weight * share for share in shares])
        for src in range(self._count):
            run.expect(src, [
                (Segment(stage, part), wave)
                for stage, wave, is_back in round_robin_slots(self._count, src)
                for part in (_BACKWARD if is_back else (Part.FORWARD,))
            ])  # fmt: skip
        sums: dict[str, tuple[torch.Tensor, Any]] = {}
        slots = round_robin_slots(self._count, self._own)
        names = [list(dict.fromkeys(each.values())) for each in programs[0].parameters]
        self.partitions.fetch(slots[0][0], names[slots[0][0]])
        for at, (stage, wave, is_back) in enumerate(slots):
            following = slots[at + 1][0] if at + 1 < len(slots) else stage
            self.partitions.fetch(following, names[following])
            for part in _BACKWARD if is_back else (Part.FORWARD,):
                run.do(Segment(stage, part), wave)
            if following != stage or at + 1 == len(slots):
                self.partitions.leave(stage)
            if is_back:
                self._begin_sums(programs[0], stage, run.gradients, sums)
        self.channels.settle()
        for name, (total, work) in sums.items():
            work.wait()
            tensor = self.tensors[name]
            total = total.to(tensor.device)
            tensor.grad = total if tensor.grad is None else tensor.grad.add_(total)
        return StepOutput(self._mean_loss(run.losses, shares), None)

    def _begin_sums(
        self,
        stage_program: RoundRobinProgram,
        stage: int,
        gradients: Mapping[tuple[str, int], torch.Tensor],
        sums: dict[str, tuple[torch.Tensor, Any]],
    ) -> None:
        """Start to reduce gradients to which no earlier partition will still contribute."""
        for parameter, parts in stage_program.addends.items():
            name = stage_program.program.names[parameter]
            if name in sums or min(_stage_of(stage_program, part) for part in parts) != stage:
                continue
            total = gradients[name, 0]
            for index in range(1, len(parts)):
                total = total.add_(gradients[name, index])
            total = total.contiguous()
            sums[name] = total, dist.all_reduce(total, group=self._sums, async_op=True)

    def _mean_loss(
        self, losses: Mapping[int, torch.Tensor], shares: Sequence[float]
    ) -> torch.Tensor:
        own = [loss.detach().reshape(()) * shares[wave] for wave, loss in losses.items()]
        total = torch.stack(own).sum()
        dist.all_reduce(total)
        return total

    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss of the full batch, which every rank computes redundantly."""
        return self._whole.evaluate(batch)

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs, which every rank computes redundantly."""
        return self._whole.predict(batch)

    def clip(self, max_norm: float) -> None:
        """Clip by the norm of all gradients, which every rank has."""
        nn.utils.clip_grad_norm_(self._task.model.parameters(), max_norm)

    # ── parts ────────────────────────────────────────────────────────────────────────────────

    def _program(self, wave: int, batch: Any) -> RoundRobinProgram:
        key = wave, signature_of(batch)
        if key not in self._programs:
            graph, program = self._recipe.trace(self._task.model, batch, "train")
            _require_own_buffers(program)
            self._programs[key] = RoundRobinProgram(
                graph, program, self._cuts[wave], self._own, self._task.device,
                seed=self._task.options.seed or 0, keep=frozenset(),
            )  # fmt: skip
        return self._programs[key]

    def given(self, stage_program: StageProgram, batch: Any) -> Slots:
        """Return slots with the tensors that exist before a wave, except parameters."""
        slots: Slots = [None] * len(stage_program.program.tensors)
        inputs = {n: t for n, role, t in all_tensors(self._task.model, batch) if role == Role.INPUT}
        for number, name in stage_program.program.names.items():
            if name in inputs:
                slots[number] = inputs[name].detach().to(self._task.device)
            elif (
                name in self.tensors
                and stage_program.program.tensors[number].role != Role.PARAMETER
            ):
                slots[number] = self.tensors[name].detach().to(self._task.device)
        return slots


def _stage_of(stage_program: StageProgram, tensor: int) -> int:
    segment = stage_program.segments[stage_program.program.tensors[tensor].producer]
    assert segment is not None
    return segment.stage


def _require_own_buffers(program: Program) -> None:
    """Refuse ops that change a buffer: its values would differ between ranks."""
    for call in program.calls:
        for tensor in call.written:
            if program.tensors[tensor].role == Role.BUFFER and call.phase != Phase.OPTIMIZER:
                name = program.names.get(tensor, "a buffer")
                raise UsageError(
                    f"the model changes {name!r} while it trains, which waves on different ranks "
                    "would do each for itself",
                    hint="freeze its batch norms (eval()), or use norms without running means",
                )
