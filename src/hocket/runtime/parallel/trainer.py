"""The part of one rank in a parallel run: its stages, and a training step with all others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from hocket.base.errors import RunError
from hocket.runtime.parallel.batch import token_batch, token_loss
from hocket.runtime.parallel.build import build_stage
from hocket.runtime.parallel.data import (
    local,
    own_name,
    reduce_gradients,
    settle_gradients,
    shard_part,
    whole,
    wrap_stage,
)
from hocket.runtime.parallel.job import TrainingJob
from hocket.runtime.parallel.model import TIED, slices_of
from hocket.runtime.parallel.pipeline import (
    PipelineWatch,
    WatchedStage,
    boundary_shapes,
    make_pipeline,
)
from hocket.runtime.parallel.tensor import divide_over_tensor_ranks


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
