"""Round-robin pipeline schedule: model-parallel waves of Wavelet, every rank runs every partition.

A wave is a microbatch, and a partition is a stage of the model. Rank (w + s) mod N runs partition s
of wave w. A step has 2N slots, N forward and N backward; in each slot all ranks run the same
partition for different waves. Activations of a wave stay on the rank that computed them until the
backward pass; outputs are sent to the next rank, gradients of inputs to the previous one. Every
rank has master copies of all parameters on its host, and at most two partitions on its device: that
of the current slot, and the next one, which is prefetched. After the backward slot of a partition
its gradients are summed over all ranks, concurrently with the following slots. Every rank then runs
the same optimizer update. Torch's pipelining has no schedule in which every rank runs every stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.program import Program
from hocket.graph.graph import Graph, Phase, Role
from hocket.plan.sections import Parallel
from hocket.runtime.batches import Signature, signature_of
from hocket.runtime.offload.copy_streams import CopyEvent, CopyStreams
from hocket.runtime.strategies.batch_split import microbatches
from hocket.runtime.strategies.parallel_task import ParallelTask, agree_on_model
from hocket.runtime.strategies.pipeline import SegmentRun, StageChannels
from hocket.runtime.strategies.rank_mesh import RankMesh
from hocket.runtime.strategies.stage_cuts import Part, Segment, cut_at_ops
from hocket.runtime.strategies.stage_program import StageProgram, given_slots
from hocket.runtime.strategy import StepOutput, Strategy
from hocket.runtime.trace_options import Weight

_BACKWARD = (Part.INPUT_GRADIENT, Part.WEIGHT_GRADIENT)


class Slot(NamedTuple):
    """A pass of one wave through one partition, which a rank runs at one time."""

    stage: int
    wave: int
    is_backward: bool

    @property
    def segments(self) -> list[Segment]:
        """Segments of the partition that the pass consists of."""
        parts = _BACKWARD if self.is_backward else (Part.FORWARD,)
        return [Segment(self.stage, part) for part in parts]


def round_robin_slots(num_ranks: int, rank: int) -> list[Slot]:
    """Return the slots of a rank in order."""
    stages = [*range(num_ranks), *reversed(range(num_ranks))]
    return [
        Slot(stage, (rank - stage) % num_ranks, at >= num_ranks) for at, stage in enumerate(stages)
    ]


class RoundRobinProgram(StageProgram):
    """Segments of one wave on this rank; each segment creates its own views of parameters."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        program = self.program
        parameters = {
            number for number, spec in enumerate(program.tensors)
            if spec.role == Role.PARAMETER and spec.producer < 0
        }  # fmt: skip
        stored = {program.tensors[number].storage for number in parameters} - {-1}
        self.views: list[set[int]] = [set() for _ in self._cuts.device_of_stage]
        """Views of parameters that the forward pass of each stage creates."""
        for number, spec in enumerate(program.tensors):
            maker = self.segments[spec.producer] if spec.producer >= 0 else None
            if maker is not None and maker.part == Part.FORWARD and spec.storage in stored:
                self.views[maker.stage].add(number)
        self.parameters: list[dict[int, str]] = [{} for _ in self._cuts.device_of_stage]
        """Number and name of the parameters that each stage uses."""
        by_storage = {program.tensors[n].storage: n for n in parameters if n in program.names}
        for _, segment, tensor in self._reads():
            spec = program.tensors[tensor]
            root = tensor if tensor in parameters else by_storage.get(spec.storage, -1)
            if root in program.names:
                self.parameters[segment.stage][root] = program.names[root]

    def remake_views(self, stage: int) -> None:
        """Create the views of parameters anew, for a partition that was fetched again."""
        for do, op, _ in self._bound.get(Segment(stage, Part.FORWARD), ()):
            if any(made in self.views[stage] for made in self.program.calls[op].outputs):
                do()


class PartitionPrefetch:
    """Parameters of the partitions on the device; the caller holds at most two at a time."""

    def __init__(self, engines: CopyStreams, host: Mapping[str, torch.Tensor]) -> None:
        self._engines, self._host = engines, host
        self._here: dict[int, tuple[dict[str, torch.Tensor], CopyEvent]] = {}

    def fetch(self, stage: int, names: Sequence[str]) -> None:
        """Start to copy a partition to the device, unless it is resident."""
        if stage in self._here:
            return
        sources = [self._host[name].detach() for name in names]
        targets = [torch.empty_like(each, device=self._engines.device) for each in sources]
        copied = self._engines.fetch(list(zip(targets, sources, strict=True)))
        self._here[stage] = dict(zip(names, targets, strict=True)), copied

    def use(self, stage: int) -> dict[str, torch.Tensor]:
        """Wait for a fetched partition and return its parameters."""
        tensors, copied = self._here[stage]
        copied.wait()
        return tensors

    def leave(self, stage: int) -> None:
        """Release a partition that is not needed any more."""
        self._here.pop(stage, None)


class _RoundRobinRun(SegmentRun):
    """One training step on this rank."""

    def __init__(self, partitions: PartitionPrefetch, *args: Any) -> None:
        super().__init__(*args)
        self._partitions = partitions

    def _begin(self, traced: StageProgram, segment: Segment) -> None:
        assert isinstance(traced, RoundRobinProgram)
        here = self._partitions.use(segment.stage)
        for number, name in traced.parameters[segment.stage].items():
            traced.slots[number] = here[name]
        if segment.part != Part.FORWARD:
            traced.remake_views(segment.stage)

    def _end(self, traced: StageProgram, segment: Segment) -> None:
        assert isinstance(traced, RoundRobinProgram)
        # References in slots would keep a released partition in device memory.
        for number in (*traced.parameters[segment.stage], *traced.views[segment.stage]):
            traced.slots[number] = None


class RoundRobinPipeline(Strategy):
    """One rank of a round-robin pipeline."""

    def __init__(self, task: ParallelTask, planned: Graph, parallel: Parallel) -> None:
        self._task, self._recipe = task, task.recipe
        self.predicted_s = task.predicted_s
        mesh = RankMesh.of_replicas([len(parallel.replicas)], task.device)
        self._own, self._count = mesh.pipeline_rank, len(parallel.replicas)
        agree_on_model(task.model, task.device)
        cut, ranks = cut_at_ops(planned, parallel.replicas[0].cuts), range(self._count)
        self._cuts = [
            cut._replace(device_of_stage=tuple((wave + s) % self._count for s in ranks))
            for wave in ranks
        ]
        self._sizes = [replica.num_samples for replica in parallel.replicas]
        self._programs: dict[tuple[int, Signature], RoundRobinProgram] = {}
        self._whole: Strategy = task.on_one_device(task.batch, task.options.seed)
        self.tensors: Mapping[str, torch.Tensor] = self._whole.tensors
        self._buffers = {
            name: t for name, t in self.tensors.items() if not isinstance(t, nn.Parameter)
        }
        engines = CopyStreams(task.device, is_real=task.device.type == "cuda")
        self._partitions = PartitionPrefetch(engines, self.tensors)
        self._channels = StageChannels(ranks, self._own, task.device, mesh.directions)
        self._sums = dist.new_group()

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, with the same gradients on every rank."""
        self._recipe.make_update(optimizer)

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run all waves forward and backward; in each slot this rank runs one pass of one wave."""
        batches, shares = microbatches(batch, self._sizes, self._task.count)
        programs = [self._program(wave, each) for wave, each in enumerate(batches)]
        held = [
            given_slots(program, self._task.model, each, self._buffers)
            for program, each in zip(programs, batches, strict=True)
        ]
        weights = [weight * share for share in shares]
        run = _RoundRobinRun(self._partitions, self._channels, programs, held, step, weights)
        for src in range(self._count):
            slots = round_robin_slots(self._count, src)
            run.expect(src, [(segment, slot.wave) for slot in slots for segment in slot.segments])
        sums: dict[str, tuple[torch.Tensor, Any]] = {}
        slots = round_robin_slots(self._count, self._own)
        names = [list(dict.fromkeys(each.values())) for each in programs[0].parameters]
        self._partitions.fetch(slots[0].stage, names[slots[0].stage])
        for slot, following in zip(slots, [*slots[1:], None], strict=True):
            if following is not None:
                self._partitions.fetch(following.stage, names[following.stage])
            for segment in slot.segments:
                run.do(segment, slot.wave)
            # The last forward and the first backward slot use the same partition.
            if following is None or following.stage != slot.stage:
                self._partitions.leave(slot.stage)
            if slot.is_backward:
                self._begin_sums(programs[0], slot.stage, run.gradients, sums)
        self._channels.flush()
        for name, (total, work) in sums.items():
            work.wait()
            tensor = self.tensors[name]
            total = total.to(tensor.device)
            tensor.grad = total if tensor.grad is None else tensor.grad.add_(total)
        loss = torch.stack([found * shares[wave] for wave, found in run.losses.items()]).sum(0)
        dist.all_reduce(loss)
        return StepOutput(loss, None)

    def _begin_sums(
        self,
        traced: RoundRobinProgram,
        stage: int,
        gradients: Mapping[tuple[str, int], torch.Tensor],
        sums: dict[str, tuple[torch.Tensor, Any]],
    ) -> None:
        """Start to reduce the gradients that are complete after this stage's backward pass.

        Backward runs stages in descending order, so the lowest stage with a part comes last.
        """
        for parameter, parts in traced.addends.items():
            name = traced.program.names[parameter]
            makers = [traced.segments[traced.program.tensors[part].producer] for part in parts]
            if name in sums or min(maker.stage for maker in makers if maker) != stage:
                continue
            total = gradients[name, 0]
            for index in range(1, len(parts)):
                total = total.add_(gradients[name, index])
            total = total.contiguous()
            sums[name] = total, dist.all_reduce(total, group=self._sums, async_op=True)

    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss of the full batch, which every rank computes redundantly."""
        return self._whole.evaluate(batch)

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs, which every rank computes redundantly."""
        return self._whole.predict(batch)

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


def _require_own_buffers(program: Program) -> None:
    """Refuse models that write to buffers while training: values would differ between ranks."""
    for call in program.calls:
        for tensor in call.written:
            if program.tensors[tensor].role == Role.BUFFER and call.phase != Phase.OPTIMIZER:
                name = program.names.get(tensor, "a buffer")
                raise UsageError(
                    f"the model changes {name!r} while it trains, so its values would differ "
                    "between ranks that run different waves",
                    hint="freeze its batch norms (eval()), or use norms without running means",
                )
