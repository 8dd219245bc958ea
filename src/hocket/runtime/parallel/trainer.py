"""The part of one rank in a parallel run: its stages, and a training step with all others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from hocket.base.errors import RunError
from hocket.runtime.parallel.batch import token_batch, token_loss
from hocket.runtime.parallel.build import build_stage
from hocket.runtime.parallel.job import TrainingJob
from hocket.runtime.parallel.model import TIED, Embedding, TransformerBlock, slices_of
from hocket.runtime.parallel.pipeline import (
    PipelineWatch,
    WatchedStage,
    boundary_shapes,
    make_pipeline,
)
from hocket.runtime.parallel.refusals import DataProgram

# Tensor parallelism of one part of a stage: matrices by columns, then by rows.
#
# Between blocks activations are plain tensors: whole on every rank, or this rank's stretch of the
# sequence where sequence parallelism is on. Weights are cut out of what each rank has drawn,
# without communication.

_SEQUENCE = Shard(1)


def divide_over_tensor_ranks(
    module: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool
) -> nn.Module:
    """Divide an embedding, a block or a head in place."""
    if isinstance(module, Embedding):
        plan = _EMBEDDING
        if sequence_parallel:
            # Positions are added to the whole sequence, which is split after that.
            parallelize_module(module, mesh, _SPLIT, src_data_rank=None)
    else:
        plan = (
            _block(sequence_parallel)
            if isinstance(module, TransformerBlock)
            else _head(sequence_parallel)
        )
    plan = {name: style for name, style in plan.items() if _has(module, name)}
    return parallelize_module(module, mesh, plan, src_data_rank=None)


_EMBEDDING: dict[str, ParallelStyle] = {
    "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
}
_SPLIT = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=_SEQUENCE)


def _block(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    between = _SEQUENCE if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.output": RowwiseParallel(output_layouts=between),
        "mlp.up": ColwiseParallel(),
        "mlp.gate": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        gather = PrepareModuleInput(input_layouts=_SEQUENCE, desired_input_layouts=Replicate())
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        plan |= {"attention": gather, "mlp": gather}
    return plan


def _head(sequence_parallel: bool) -> dict[str, ParallelStyle]:
    between = _SEQUENCE if sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "logits": ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    }
    return plan | ({"norm": SequenceParallel()} if sequence_parallel else {})


def _has(module: nn.Module, name: str) -> bool:
    first, _, rest = name.partition(".")
    inner = getattr(module, first, None)
    return inner is not None and (not rest or _has(inner, rest))


# Data parallelism: who holds which part of the weights, and how gradients become one.


def shard_part(module: nn.Module, mesh: DeviceMesh, data: DataProgram) -> nn.Module:
    """Divide one part of a stage where weights are divided, else leave it."""
    if data.kind == "fsdp":
        fully_shard(module, mesh=mesh, reshard_after_forward=data.reshards)
    return module


def wrap_stage(stage: nn.Module, mesh: DeviceMesh, data: DataProgram) -> nn.Module:
    """The stage as the pipeline sees it."""
    if data.kind == "ddp":
        return DistributedDataParallel(stage, process_group=mesh.get_group())
    return shard_part(stage, mesh, data)


def reduce_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average gradients over the data-parallel ranks, all of one type in one message."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=mesh.get_group())
        flat /= mesh.size()
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))


def settle_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Lay gradients out as their parameters are; autograd leaves some whole and some as sums.

    A gradient that is not there becomes zeros, so that all ranks go on together: the names of
    such parameters.
    """
    missing = []
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            missing.append(name)
            parameter.grad = torch.zeros_like(parameter)
        elif isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
    return missing


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in one piece; all ranks that share it must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_name(name: str) -> str:
    """The name of a parameter in the model, without what wrappers add."""
    return name.removeprefix("module.")


@dataclass(kw_only=True)
class RankStep:
    """What one rank saw of one step; times are seconds of one clock."""

    start_s: float
    end_s: float = 0.0
    loss: float | None = None
    """Of the whole batch, where this rank has the last stage."""
    action_start_s: list[float] = field(default_factory=list)
    """Of the actions of this rank in order; empty on GPUs, where the host's times say nothing."""
    action_end_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """On GPUs."""


class Trainer:
    """One rank of a job."""

    def __init__(
        self, job: TrainingJob, device: torch.device, move: Callable[[int, int], None]
    ) -> None:
        division = job.division
        self.job, self.device = job, device
        self.mesh = init_device_mesh(
            device.type,
            (division.pipeline, division.data, division.tensor),
            mesh_dim_names=("pp", "dp", "tp"),
        )
        self.pipeline_rank, self.data_rank, self.tensor_rank = (
            self.mesh.get_coordinate() or (0,) * 3
        )
        self._stages = {
            number: self._build(number)
            for number, owner in enumerate(job.device_of_stage)
            if owner == self.pipeline_rank
        }
        self._watch = PipelineWatch(move)
        self._pipeline = make_pipeline(
            job, [self._pipelined(number) for number in self._stages], token_loss, self._watch
        )
        self._optimizer = new_optimizer(self._weights(), job.learning_rate)

    def step(self, number: int) -> RankStep:
        """One step together with all other ranks; they count from 1."""
        ids, targets = self._batch(number)
        self._optimizer.zero_grad()
        self._settle()
        dist.barrier()
        self._watch.new_step(number)
        seen = RankStep(start_s=time.perf_counter())
        losses: list[torch.Tensor] = []
        self._pipeline.step(*ids, target=targets, losses=losses, return_outputs=False)
        missing = settle_gradients(self._parameters())
        if missing and not self.job.wants_gradients:
            raise RunError(f"PyTorch made no gradient for {missing[0]!r}")
        if self.job.data.kind == "reduce-after":
            reduce_gradients(self._weights(), self.mesh["dp"])
        self._sum_tied()
        seen.loss = self._mean_loss(losses)
        self._optimizer.step()
        self._settle()
        seen.end_s = time.perf_counter()
        if self.device.type == "cuda":
            seen.peak_bytes = torch.cuda.max_memory_allocated(self.device)
        else:
            seen.action_start_s, seen.action_end_s = self._watch.begin_s, self._watch.end_s
        return seen

    def gradients(self) -> dict[str, torch.Tensor]:
        """Gradients of this rank's stages in one piece; all ranks must ask."""
        return {
            name: whole(parameter.grad).detach().cpu()
            for name, parameter in self._parameters()
            if parameter.grad is not None
        }

    # ── building ─────────────────────────────────────────────────────────────────────────────

    def _build(self, number: int) -> nn.Module:
        job, division = self.job, self.job.division

        def divide(module: nn.Module) -> nn.Module:
            if division.tensor > 1:
                module = divide_over_tensor_ranks(
                    module, self.mesh["tp"], sequence_parallel=division.sequence_parallel
                )
            return shard_part(module, self.mesh["dp"], job.data)

        stage = build_stage(
            job.model,
            slices_of(job.layers)[number],
            recompute=division.recompute,
            seed=job.seed,
            dtype=getattr(torch, job.dtype),
            device=self.device,
            divide=divide,
        )
        return wrap_stage(stage, self.mesh["dp"], job.data)

    def _pipelined(self, number: int) -> WatchedStage:
        given, made = boundary_shapes(self.job, number)
        return WatchedStage(
            self._stages[number], number, len(self.job.layers), self.device,
            input_args=given, output_args=made, group=self.mesh["pp"].get_group(),
        )  # fmt: skip

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self._stages.values():
            for name, parameter in stage.named_parameters():
                yield own_name(name), parameter

    def _weights(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._parameters()]

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def _batch(self, number: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """The input of the first stage and the target of the last, where this rank has them."""
        share = self.job.division.global_batch // self.job.division.data
        sequences = range(self.data_rank * share, (self.data_rank + 1) * share)
        ids, targets = token_batch(self.job.model, sequences, seed=self.job.seed, step=number)
        return (
            (ids.to(self.device),) if 0 in self._stages else (),
            targets.to(self.device) if self._is_last else None,
        )

    @property
    def _is_last(self) -> bool:
        return len(self.job.layers) - 1 in self._stages

    def _mean_loss(self, losses: list[torch.Tensor]) -> float | None:
        if not self._is_last:
            return None
        mean = torch.stack([loss.detach() for loss in losses]).mean()
        dist.all_reduce(mean, group=self.mesh["dp"].get_group())
        return float(mean) / self.job.division.data

    def _sum_tied(self) -> None:
        """Give both copies of a tied embedding the sum of their gradients."""
        if not self.job.model.tied_embeddings:
            return
        copies = [p for name, p in self._parameters() if name in TIED]
        gradients = [local(p.grad) for p in copies if p.grad is not None]
        if len(gradients) == len(TIED):
            gradients[0] += gradients[1]
            gradients[1].copy_(gradients[0])
        elif gradients:
            owners = self.job.device_of_stage[0], self.job.device_of_stage[-1]
            other = owners[0] if owners[1] == self.pipeline_rank else owners[1]
            gradients[0] += self._exchanged(gradients[0], other)

    def _exchanged(self, tensor: torch.Tensor, pipeline_rank: int) -> torch.Tensor:
        """The tensor of the same kind that another pipeline rank has."""
        group = self.mesh["pp"].get_group()
        peer = dist.get_global_rank(group, pipeline_rank)
        arrived = torch.empty_like(tensor)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor.contiguous(), peer, group),
                dist.P2POp(dist.irecv, arrived, peer, group),
            ]
        )
        for work in works:
            work.wait()
        return arrived

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def new_optimizer(parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW; parameters of one mesh form a group, since PyTorch updates a group in one call."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh: DeviceMesh | None = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()], lr=learning_rate, weight_decay=0.0
    )
