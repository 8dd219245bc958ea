"""The trainer of exported scripts, on PyTorch's own engines; its text goes into each script.

Scripts must not need hocket, so this is separate from the strategies of `hocket.runtime`. Nothing
of hocket calls it but the scripts.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules
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

from hocket.base.errors import MissingExtraError, RunError
from hocket.export.torch import DataKind
from hocket.runtime.transformer_model import (
    TIED,
    Embedding,
    Head,
    TransformerBlock,
    fill,
    token_batch,
    token_loss,
)
from hocket.transformer import ParallelConfig, Transformer


class Stage(nn.Module):
    """One virtual stage; its parameters have the names of the whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding: nn.Module | None = None
        self.layers = nn.ModuleDict()
        self.head: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map token ids or activations to activations or logits."""
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


Actions = tuple[tuple[tuple[int, str, int], ...], ...]
"""Virtual stage, letter and microbatch of each action, in order, by pipeline rank.

Letters are those of PyTorch's pipelines: F forward, B backward, I and W the backward for inputs and
for weights.
"""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """A model, its parallel configuration and the number of training steps."""

    model: Transformer
    config: ParallelConfig
    layers: tuple[int, ...]
    """Number of layers of each virtual stage."""
    actions: Actions
    device_of_stage: tuple[int, ...]
    data: DataKind
    steps: int = 1
    seed: int = 0
    dtype: str = "float32"
    learning_rate: float = 1e-3

    @property
    def last_stage(self) -> int:
        """Index of the virtual stage that computes the loss."""
        return len(self.layers) - 1


_OLDEST, _FOLDS_SINCE = (2, 11), (2, 13)
"""Minimum versions of PyTorch: to run a schedule from a file, and to run one in which a rank has
two consecutive stages. Before the second version a rank sent activations to itself and failed.
"""


def require_pipelining(device_of_stage: Sequence[int]) -> None:
    """Refuse a PyTorch whose pipelines cannot run custom schedules on such stages."""
    is_folded = any(first == second for first, second in pairwise(device_of_stage))
    needed = _FOLDS_SINCE if is_folded else _OLDEST
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < needed:
        raise MissingExtraError(
            f"PyTorch {torch.__version__} cannot run this schedule: its pipelines can since "
            f"{needed[0]}.{needed[1]}",
            hint="hocket is tested with PyTorch 2.13: pip install 'torch==2.13.*'",
        )


def make_pipeline(
    job: TrainingJob,
    stages: Sequence[PipelineStage],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Any:
    """Runtime of PyTorch for the stages of one rank, with the job's order of actions."""
    runtime: Any = schedules._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        list(stages), n_microbatches=job.config.num_microbatches, loss_fn=loss
    )
    runtime.pipeline_order = {
        rank: [schedules._Action.from_str(f"{stage}{letter}{microbatch}")
               for stage, letter, microbatch in row]
        for rank, row in enumerate(job.actions)
    }  # fmt: skip
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return runtime


def boundary_shapes(job: TrainingJob, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a stage for one microbatch, as meta tensors."""
    model, config = job.model, job.config
    parts = config.tensor if config.sequence_parallel else 1

    def of(*shape: int) -> torch.Tensor:
        dtype = getattr(torch, job.dtype)
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    between = of(config.microbatch, model.sequence // parts, model.hidden)
    ids = torch.empty(config.microbatch, model.sequence, dtype=torch.int64, device="meta")
    logits = of(config.microbatch, model.sequence, model.vocabulary)
    return (ids if stage == 0 else between), (logits if stage == job.last_stage else between)


# Tensor parallelism of one part of a stage: matrices by columns, then by rows.
#
# Between blocks activations are plain tensors: whole on every rank, or this rank's stretch of the
# sequence where sequence parallelism is on. Weights are cut out of what each rank has drawn,
# without communication.

_SEQUENCE = Shard(1)


def shard_over_tensor_ranks(
    module: nn.Module, mesh: DeviceMesh, *, sequence_parallel: bool
) -> nn.Module:
    """Shard an embedding, a block or a head over tensor-parallel ranks, in place."""
    if isinstance(module, Embedding):
        plan = _EMBEDDING
        if sequence_parallel:
            # Positions are added to the whole sequence, which may be split only after that.
            parallelize_module(module, mesh, _SPLIT, src_data_rank=None)
    else:
        plan = (_block if isinstance(module, TransformerBlock) else _head)(sequence_parallel)
    names = {name for name, _ in module.named_modules()}
    plan = {name: style for name, style in plan.items() if name in names}
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


# Data parallelism: who holds which part of the weights, and how gradients become one.


def shard_part(module: nn.Module, mesh: DeviceMesh, data: DataKind) -> nn.Module:
    """Shard one part of a stage if weights are sharded; otherwise return it unchanged."""
    if data.startswith("fsdp"):
        fully_shard(module, mesh=mesh, reshard_after_forward=data == "fsdp-reshard")
    return module


def wrap_stage(stage: nn.Module, mesh: DeviceMesh, data: DataKind) -> nn.Module:
    """Wrap a stage in DDP or FSDP2, as the pipeline runs it."""
    if data == "ddp":
        return DistributedDataParallel(stage, process_group=mesh.get_group())
    return shard_part(stage, mesh, data)


def reduce_gradients(parameters: Iterable[nn.Parameter], mesh: DeviceMesh) -> None:
    """Average gradients, which share one dtype, over the data-parallel ranks in one all-reduce."""
    gradients = [local(p.grad) for p in parameters if p.grad is not None]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat, group=mesh.get_group())
    flat /= mesh.size()
    means = torch.split(flat, [gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def settle_gradients(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Redistribute gradients to the placements of their parameters; autograd may leave partial
    sums.
    """
    for name, parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            raise RunError(f"PyTorch made no gradient for {name!r}")
        if isinstance(parameter, DTensor) and isinstance(gradient, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Local shard of a tensor; it shares the tensor's memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Trainer:
    """Trainer of one rank of a job."""

    def __init__(self, job: TrainingJob, device: torch.device) -> None:
        config = job.config
        self.job, self.device = job, device
        self.mesh = init_device_mesh(
            device.type,
            (config.pipeline, config.data, config.tensor),
            mesh_dim_names=("pp", "dp", "tp"),
        )
        place = self.mesh.get_coordinate() or (0, 0, 0)
        self.pipeline_rank, self.data_rank, self.tensor_rank = place
        self._stages = {
            number: self._build(number)
            for number, owner in enumerate(job.device_of_stage)
            if owner == self.pipeline_rank
        }
        self._pipeline = make_pipeline(
            job, [self._pipelined(number) for number in self._stages], token_loss
        )
        self._optimizer = new_optimizer(self._weights(), job.learning_rate)

    def step(self, number: int) -> float | None:
        """Train one step with all other ranks; return the loss on ranks with the last stage, else
        None.
        """
        ids, targets = self._batch(number)
        self._optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        self._pipeline.step(*ids, target=targets, losses=losses, return_outputs=False)
        settle_gradients(self._parameters())
        if self.job.data == "reduce-after":
            reduce_gradients(self._weights(), self.mesh["dp"])
        # After the reduction, so that both copies of a tied embedding add gradients of the whole
        # batch.
        self._sum_tied()
        loss = self._mean_loss(losses)
        self._optimizer.step()
        return loss

    # ── building ─────────────────────────────────────────────────────────────────────────────

    def _build(self, number: int) -> nn.Module:
        """Build a virtual stage with initial weights; each of its parts is sharded at once."""
        job, stage = self.job, Stage()
        if number == 0:
            stage.embedding = self._part("embedding", lambda: Embedding(job.model))
        first = sum(job.layers[:number])
        for layer in range(first, first + job.layers[number]):
            stage.layers[str(layer)] = self._part(
                f"layers.{layer}", lambda: TransformerBlock(job.model, job.config.recompute)
            )
        if number == job.last_stage:
            stage.head = self._part("head", lambda: Head(job.model))
        return wrap_stage(stage, self.mesh["dp"], job.data)

    def _part(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        job, config = self.job, self.job.config
        # Built on the meta device, then filled part by part, so that a rank never holds the whole
        # model.
        with torch.device("meta"):
            module = make()
        module = module.to_empty(device=self.device).to(getattr(torch, job.dtype))
        fill(module, name, job.model, job.seed)
        if config.tensor > 1:
            module = shard_over_tensor_ranks(
                module, self.mesh["tp"], sequence_parallel=config.sequence_parallel
            )
        return shard_part(module, self.mesh["dp"], job.data)

    def _pipelined(self, number: int) -> PipelineStage:
        given, made = boundary_shapes(self.job, number)
        return PipelineStage(
            self._stages[number], number, len(self.job.layers), self.device,
            input_args=given, output_args=made, group=self.mesh["pp"].get_group(),
        )  # fmt: skip

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for stage in self._stages.values():
            for name, parameter in stage.named_parameters():
                yield name.removeprefix("module."), parameter  # DDP's wrapper adds it

    def _weights(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._parameters()]

    # ── a step ───────────────────────────────────────────────────────────────────────────────

    def _batch(self, number: int) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Input of the first stage and target of the last stage; empty and None on other ranks."""
        share = self.job.config.global_batch // self.job.config.data
        sequences = range(self.data_rank * share, (self.data_rank + 1) * share)
        ids, targets = token_batch(self.job.model, sequences, seed=self.job.seed, step=number)
        return (
            (ids.to(self.device),) if 0 in self._stages else (),
            targets.to(self.device) if self._is_last else None,
        )

    @property
    def _is_last(self) -> bool:
        return self.job.last_stage in self._stages

    def _mean_loss(self, losses: list[torch.Tensor]) -> float | None:
        if not self._is_last:
            return None
        mean = torch.stack([loss.detach() for loss in losses]).mean()
        dist.all_reduce(mean, group=self.mesh["dp"].get_group())
        return float(mean) / self.job.config.data

    def _sum_tied(self) -> None:
        """Add the gradients of both copies of a tied embedding, and give each copy the sum."""
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
        """Exchange equal-sized tensors with another pipeline rank; return the received one."""
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


def new_optimizer(parameters: list[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """AdamW with one parameter group per mesh, because PyTorch updates a group in one call."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh: DeviceMesh | None = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return torch.optim.AdamW(
        [{"params": group} for group in groups.values()], lr=learning_rate, weight_decay=0.0
    )


def train(job: TrainingJob) -> None:
    """Train with synthetic text and print the loss of every step."""
    given = _arguments()
    require_pipelining(job.device_of_stage)
    device = _join()
    usual = job.dtype if device.type == "cuda" else "float32"
    job = replace(job, steps=given.steps, seed=given.seed, dtype=given.dtype or usual)
    trainer = Trainer(job, device)
    for number in range(1, job.steps + 1):
        began_s = time.perf_counter()
        loss = trainer.step(number)
        if loss is not None and not trainer.data_rank and not trainer.tensor_rank:
            took_s = time.perf_counter() - began_s
            sys.stdout.write(f"step {number} loss {loss:.9g} {took_s:.3f} s\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def read_actions(path: Path) -> Actions:
    """Read stage, letter and microbatch of each action of each pipeline rank from a CSV file."""
    with path.open(newline="") as file:
        return tuple(tuple(_action(cell) for cell in row) for row in csv.reader(file))


def _action(cell: str) -> tuple[int, str, int]:
    stage, letter, microbatch = re.split("([FBIW])", cell)
    return int(stage), letter, int(microbatch)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="float32, bfloat16 …; as planned on GPUs where not given")
    return parser.parse_args()


def _join() -> torch.device:
    """Join the process group of torchrun; return this process's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
