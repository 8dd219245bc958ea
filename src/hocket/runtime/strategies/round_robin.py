"""Round-robin pipeline schedule: model-parallel waves of Wavelet, every rank runs every partition.

Wave w has its partition s on rank (w + s) mod N, so that in each of the 2N slots of a step all
ranks run the same partition, forward up to the last one and back, each on another wave. Activations
of a wave stay on their rank until its backward pass comes; outputs go to the next rank, gradients
of inputs to the one before. Master copies of parameters are on every rank's host, and two
partitions at a time are on its device: that of this slot, and the next, which is prefetched. When
the backward slot of a partition is over, its gradients are summed over all ranks, concurrently with
the slots that follow; then each rank updates, and all have the same parameters.
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
from hocket.runtime.offload.copy_streams import CopyEvent, CopyStreams
from hocket.runtime.strategies.batch_split import microbatches
from hocket.runtime.strategies.parallel_task import ParallelTask, agree_on_model
from hocket.runtime.strategies.pipeline import SegmentRun, StageChannels
from hocket.runtime.strategies.stage_cuts import Part, Segment, cut_at_ops
from hocket.runtime.strategies.stage_program import StageProgram
from hocket.runtime.strategy import StepOutput, Strategy, Timings
from hocket.runtime.train.batches import Signature, signature_of
from hocket.runtime.train.eager_step import Slots
from hocket.runtime.train.loss_weight import Weight

_BACKWARD = (Part.INPUT_GRADIENT, Part.WEIGHT_GRADIENT)


def round_robin_slots(num_ranks: int, rank: int) -> list[tuple[int, int, bool]]:
    """Per slot: the partition, the wave that this rank has, and whether it goes back."""
    stages = [*range(num_ranks), *reversed(range(num_ranks))]
    return [
        (stage, (rank - stage) % num_ranks, slot >= num_ranks) for slot, stage in enumerate(stages)
    ]


class RoundRobinProgram(StageProgram):
    """One wave's segments on this rank; what looks at parameters is made anew for each of them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        program = self.program
        parameters = {
            number for number, spec in enumerate(program.tensors)
            if spec.role == Role.PARAMETER and spec.producer < 0
        }  # fmt: skip
        stored = {program.tensors[number].storage for number in parameters} - {-1}
        self.views: list[set[int]] = [set() for _ in self._cuts.device_of_stage]
        """By stage: tensors made there that look at parameters; other stages get copies."""
        for number, spec in enumerate(program.tensors):
            maker = self.segments[spec.producer] if spec.producer >= 0 else None
            if maker is not None and maker.part == Part.FORWARD and spec.storage in stored:
                self.views[maker.stage].add(number)
        self.parameters: list[dict[int, str]] = [{} for _ in self._cuts.device_of_stage]
        """By stage: the parameters that it computes with, and their names."""
        by_storage = {program.tensors[n].storage: n for n in parameters if n in program.names}
        for op, tensor in self._reads():
            segment, spec = self.segments[op], program.tensors[tensor]
            root = tensor if tensor in parameters else by_storage.get(spec.storage, -1)
            if segment is not None and root in program.names:
                self.parameters[segment.stage][root] = program.names[root]

    def look_again(self, stage: int) -> None:
        """Make the views of a partition that has been fetched anew."""
        for do, op, _ in self._bound.get(Segment(stage, Part.FORWARD), ()):
            if any(made in self.views[stage] for made in self.program.calls[op].outputs):
                do()


@dataclass(frozen=True, eq=False)
class _Fetched:
    tensors: dict[str, torch.Tensor]
    ticket: CopyEvent


class PartitionPrefetch:
    """Parameters of partitions where they are computed with: at most two at a time."""

    def __init__(self, engines: CopyStreams, host: Mapping[str, torch.Tensor]) -> None:
        self._engines, self._host = engines, host
        self._here: dict[int, _Fetched] = {}

    def fetch(self, stage: int, names: Sequence[str]) -> None:
        """Start to copy a partition to the device, unless it is there."""
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
        """A partition that was fetched."""
        found = self._here[stage]
        found.ticket.wait()
        return found.tensors

    def leave(self, stage: int) -> None:
        """A partition is not computed with any more; the next time it is another one."""
        self._here.pop(stage, None)


class _RoundRobinRun(SegmentRun):
    """One step of this rank."""

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


class RoundRobinPipeline:
    """One rank of a round-robin pipeline; see `Strategy`."""

    lost = ""

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

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Updates wait for all gradients."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer, the same on every rank."""
        self._recipe.make_update(optimizer)

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """All waves forward and backward, each rank a partition of one of them per slot."""
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
        """Start to sum over all ranks what no partition before this one adds to."""
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

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """As `train`: ranks time nothing."""
        return self.train(batch, step, weight), None

    def forward(self, batch: Any, step: int) -> StepOutput:
        """Refuse: waves go forward and backward in turns."""
        raise UsageError(
            "a round-robin pipeline runs forward and backward as one list",
            hint="call train.step(batch) instead of loss.backward() and optimizer.step()",
        )

    def evaluate(self, batch: Any) -> StepOutput:
        """The loss, by each rank alone."""
        return self._whole.evaluate(batch)

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs, by each rank alone."""
        return self._whole.predict(batch)

    def clip(self, max_norm: float) -> None:
        """By the norm of all gradients, which every rank has."""
        nn.utils.clip_grad_norm_(self._task.model.parameters(), max_norm)

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Every rank has everything."""

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
        """Return slots with the tensors there before a wave, without parameters."""
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
    """Refuse ops that change a buffer: every rank would have another one."""
    for call in program.calls:
        for tensor in call.written:
            if program.tensors[tensor].role == Role.BUFFER and call.phase != Phase.OPTIMIZER:
                name = program.names.get(tensor, "a buffer")
                raise UsageError(
                    f"the model changes {name!r} while it trains, which waves on different ranks "
                    "would do each for itself",
                    hint="freeze its batch norms (eval()), or use norms without running means",
                )
