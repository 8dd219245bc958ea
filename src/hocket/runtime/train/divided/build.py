"""From a config to what carries a person's module: tensor, pipeline and data parallel in turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hocket.base.errors import UsageError
from hocket.plan.sections import Schedule
from hocket.planners.parallel.schedules import make_schedule
from hocket.runtime.collectives.priority_sync import Propagation
from hocket.runtime.strategy import Passes, Strategy
from hocket.runtime.train.batches import settled
from hocket.runtime.train.cuts import TensorCut
from hocket.runtime.train.divided.accumulated import Accumulated, AccumulatedAlone
from hocket.runtime.train.divided.again import all_layers
from hocket.runtime.train.divided.agreement import require_same_everywhere, share_weights
from hocket.runtime.train.divided.collectives import summed
from hocket.runtime.train.divided.cutting import Cutting, cut_by_layers
from hocket.runtime.train.divided.hollow import fill_hollow
from hocket.runtime.train.divided.mesh import Mesh
from hocket.runtime.train.divided.prioritised import PrioritisedReplicas
from hocket.runtime.train.divided.replicas import Replicas
from hocket.runtime.train.divided.sharded import ShardedModel
from hocket.runtime.train.divided.shares import (
    Count,
    ignored_labels,
    microbatches,
    num_rows,
    shared_rows,
    take_rows,
)
from hocket.runtime.train.divided.stack import find_stack, layer_paths
from hocket.runtime.train.divided.staged import Pipeline
from hocket.runtime.train.divided.tensor import divide_layers
from hocket.runtime.train.eager_model import CalledModel
from hocket.runtime.train.replayed_waves import make_waves
from hocket.runtime.train.trace_options import Recipe
from hocket.runtime.train.traced_model import Programs
from hocket.runtime.train.waves import WaveOrder, Waves
from hocket.transformer import ParallelConfig
from hocket.transformer.rules import broken_shares

# Batch norm over the rows of all replicas: the statistics that one process would see.
#
# Mean and variance are sums over ranks, and their gradients are sums over ranks as well (Zhang et
# al., "Context Encoding", 2018). PyTorch has this for GPUs alone, and without unequal shares.


def join_batch_norms(model: nn.Module, group: Any) -> int:
    """Let every batch norm of a model see the rows of all ranks of a group; how many there are."""
    found = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    for module in found:
        # The class stays, with names and parameters; a copy of the module binds to itself.
        module.forward = MethodType(_joined(type(module).forward, group), module)  # type: ignore[method-assign]
    return len(found)


def batch_norms_in_training(model: nn.Module) -> list[str]:
    """Names of the batch norms that would normalise by the rows that they see."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
    ]


def _joined(alone: Callable[..., torch.Tensor], group: Any) -> Callable[..., torch.Tensor]:
    def forward(self: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
        if not self.training and self.running_mean is not None:
            return alone(self, x)
        self._check_input_dim(x)  # type: ignore[no-untyped-call]
        dims = [dim for dim in range(x.dim()) if dim != 1]
        rows = x.new_full((1,), x.numel() // x.shape[1])
        totals = summed(torch.cat([x.sum(dims), rows]), group)
        count = totals[-1].detach()
        mean = totals[:-1] / count
        shape = [1, -1] + [1] * (x.dim() - 2)
        centred = x - mean.view(shape)
        variance = summed(centred.square().sum(dims), group) / count
        _keep_statistics(self, mean, variance, count)
        out = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape) + self.bias.view(shape)
        return out

    return forward


@torch.no_grad()
def _keep_statistics(
    norm: _BatchNorm, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor
) -> None:
    if not norm.training or norm.running_mean is None or norm.running_var is None:
        return
    assert norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    unbiased = variance * (count / (count - 1))
    if norm.momentum is None:
        rate = 1.0 / norm.num_batches_tracked.to(mean.dtype)
        norm.running_mean.add_(rate * (mean - norm.running_mean))
        norm.running_var.add_(rate * (unbiased - norm.running_var))
        return
    norm.running_mean.mul_(1 - norm.momentum).add_(norm.momentum * mean)
    norm.running_var.mul_(1 - norm.momentum).add_(norm.momentum * unbiased)


MakeInner = Callable[[Recipe, Any, int | None], Strategy]
"""The strategy of the model on one device for batches like the given one, with a seed for draws."""
WARNED_LEVEL = 7
"""Callers between a warning of this file and the person's script."""


class ParallelWarning(UserWarning):
    """A config is not carried out as someone may expect."""


@dataclass(frozen=True, kw_only=True)
class DividedTask:
    """What is trained, as every rank knows it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    """Of all ranks."""
    recipe: Recipe
    device: torch.device
    """Of this rank."""
    make_inner: MakeInner
    seed: int | None
    count: Count | None
    max_shapes: int
    weights: str | Path | None
    sums_by: str | None = None
    """The backend of torch.distributed for gradients where it is not that of all else."""
    sums_in: torch.dtype | None = None
    """The dtype in which gradients are summed where it is not their own."""
    overlaps: bool = True
    """True if gradients are summed beside the backward pass; a CUDA graph is replayed without."""
    predicted_s: float | None = None
    propagates: Callable[[], Propagation] | None = None
    """Begins to send gradients by priority, where the plan says so; called once by each rank."""
    waves: WaveOrder | None = None
    """In which order two lanes take the microbatches of this rank; None: one after the other."""


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What this rank does of a task."""

    mesh: Mesh
    shares: Sequence[int]
    """Of each replica."""
    sizes: Sequence[int]
    """Proportions of the microbatches of this rank's replica."""
    zero: int = 0
    tensor: int = 1
    joins_norms: bool = True
    """True if all replicas see a batch at once, so that batch norms can see all of it."""
    pipeline: tuple[Cutting, Schedule] | None = None
    again: Sequence[str] = ()
    """Modules that are computed again for their backward pass where weights are divided."""
    is_offloaded: bool = False
    """True if parts of divided weights and of the optimizer's states live on the host."""


def degrees_strategy(
    task: DividedTask, config: ParallelConfig, schedule: Schedule | None, *, accumulates: bool
) -> Strategy:
    """Carry the model by all ranks of a config; each calls this with the same batch.

    ``accumulates`` says whether ranks without a pipeline take their microbatches one by one.
    """
    refuse_degrees(config)
    _warn_of_memory(config)
    is_split = accumulates or config.pipeline > 1
    sizes = (1,) * (config.num_microbatches if is_split else 1)
    again: Sequence[str] = ()
    if config.recompute == "full":
        again = layer_paths(task.model)
        task = replace(task, recipe=replace(task.recipe, again=all_layers(task.model)))
    if config.num_devices == 1:
        return alone(task, sizes)
    mesh = Mesh(config, task.device)
    agree(task)
    pipeline = None
    if config.pipeline > 1:
        schedule = schedule or make_schedule(
            config.schedule, config.pipeline, len(sizes), config.chunks
        )
        pipeline = cut_by_layers(task.model, config, schedule), schedule
    return carried(task, RankPart(
        mesh=mesh, shares=config.shares or (1,) * config.data, sizes=sizes,
        zero=config.zero, tensor=config.tensor, joins_norms=len(sizes) == 1, pipeline=pipeline,
        again=again,
    ))  # fmt: skip


def agree(task: DividedTask) -> None:
    """Make sure that all ranks have one model; they start from the weights of the first."""
    require_same_everywhere(task.model, task.device)
    share_weights(task.model, task.device)


def alone(task: DividedTask, sizes: Sequence[int]) -> Strategy:
    """The whole model on the one device of a plan, in this process."""
    if len(sizes) == 1:
        return task.make_inner(task.recipe, task.batch, task.seed)
    _warn_of_norms(task.model)
    first = microbatches(task.batch, sizes, task.count)[0][0]
    inner = task.make_inner(task.recipe, first, None)
    return AccumulatedAlone(
        inner, sizes, count=task.count, device=task.device, seed=task.seed,
        predicted_s=task.predicted_s, waves=_in_lanes(task, inner),
    )  # fmt: skip


def _in_lanes(task: DividedTask, inner: Passes) -> Waves | None:
    """Two lanes, where the task has them; calls that are not recorded cannot be taken in turns."""
    if task.waves is None:
        return None
    if isinstance(inner, Programs):
        return make_waves(inner, task.waves, task.device)
    warnings.warn(
        "the calls of this model are not recorded, so that its waves run one after the other: "
        "numbers are the same",
        ParallelWarning,
        WARNED_LEVEL,
    )
    return None


def carried(task: DividedTask, part: RankPart) -> Strategy:
    """The part of this rank, and the agreement with all others."""
    model, mesh = task.model, part.mesh
    own = shared_rows(num_rows(task.batch), part.shares)[mesh.data_rank]
    rows = settled(take_rows(task.batch, own))
    if not part.joins_norms:
        _warn_of_norms(model)
    if len(part.shares) > 1:
        if part.joins_norms:
            join_batch_norms(model, mesh.data_group)
        _warn_of_counts(task.batch, task.count)
    cuts: Mapping[int, TensorCut] = {}
    if part.tensor > 1:
        cuts = divide_layers(model, mesh.tensor_group, mesh.tensor_rank, part.tensor)
    stage_of: Callable[[torch.Tensor], int] = _on_the_first
    refresh: Callable[[], None] = _nothing
    waited_s: Callable[[], float] = _never
    if part.pipeline is not None:
        inner: Passes
        inner = pipeline = Pipeline(
            model, rows, task.recipe, *part.pipeline, mesh,
            sizes=part.sizes, seed=task.seed or 0, count=task.count, max_shapes=task.max_shapes,
        )  # fmt: skip
        fill_hollow(model, task.weights, pipeline.is_needed, cuts, mesh)
        stage_of, refresh, waited_s = pipeline.stage_of, pipeline.refresh, pipeline.waited_s
        pipeline.settle()
    else:
        fill_hollow(model, task.weights, _always, cuts, mesh)
        inner, cuts = _on_one_rank(task, part, rows, cuts)
    replicas: Callable[..., Replicas] = Replicas
    if task.propagates is not None:
        replicas = partial(PrioritisedReplicas, task.propagates())
    return replicas(
        inner, model, mesh, shares=part.shares, count=task.count, seed=task.seed or 0,
        zero=part.zero,
        has_own_statistics=not part.joins_norms and bool(batch_norms_in_training(model)),
        cuts=cuts, stage_of=stage_of, refresh=refresh, waited_s=waited_s,
        sums_by=task.sums_by, sums_in=task.sums_in, overlaps=task.overlaps,
        predicted_s=task.predicted_s,
    )  # fmt: skip


def _on_one_rank(
    task: DividedTask, part: RankPart, rows: Any, cuts: Mapping[int, TensorCut]
) -> tuple[Passes, Mapping[int, TensorCut]]:
    """A replica that is one rank, or several that divide each layer; and its cuts as they are then.

    Replicas that divide their weights put parts of parameters in the place of parameters.
    """
    first = microbatches(rows, part.sizes, task.count)[0][0] if len(part.sizes) > 1 else rows
    inner: Passes
    if task.propagates is not None:
        task.model.to(task.device)
        return CalledModel(task.model, task.recipe, task.device), cuts
    if part.zero == 3 and len(part.shares) > 1:
        named = {name: cuts.get(id(p)) for name, p in task.model.named_parameters()}
        inner = ShardedModel(
            task.model, task.optimizer, task.recipe, part.mesh.axes["dp"],
            again=part.again, is_offloaded=part.is_offloaded and task.device.type != "cpu",
        )  # fmt: skip
        now = dict(task.model.named_parameters())
        cuts = {id(now[name]): cut for name, cut in named.items() if cut is not None}
    else:
        inner = task.make_inner(task.recipe, first, None)
    if len(part.sizes) > 1:
        waves = _in_lanes(task, inner)
        inner = Accumulated(inner, part.sizes, count=task.count, device=task.device, waves=waves)
    return inner, cuts


def _on_the_first(tensor: torch.Tensor) -> int:
    return 0


def _always(tensor: torch.Tensor) -> bool:
    return True


def _nothing() -> None:
    """Every weight is updated where it is used."""


def _never() -> float:
    return 0.0


def require_layers(model: nn.Module, planned: int) -> None:
    """Refuse a model of another number of layers than was planned."""
    path, found = find_stack(model)
    if found != planned:
        raise UsageError(
            f"the plan divides {planned} layers, and {path or type(model).__name__} has {found}",
            hint="plan this very model",
        )


def require_batch(num_samples: int, batch: Any) -> None:
    """Refuse a batch of another size than was planned."""
    if num_rows(batch) != num_samples:
        raise UsageError(
            f"the plan is for {num_samples} samples per step, the batch has {num_rows(batch)}",
            hint="give the whole batch of all ranks, or plan for this size",
        )


def refuse_degrees(config: ParallelConfig) -> None:
    """Refuse degrees of parallelism that no strategy runs."""
    for degree, what in ((config.context, "context"), (config.expert, "expert")):
        if degree > 1:
            raise UsageError(
                f"{what} parallelism is planned and predicted but not run",
                hint=f"plan without it: hocket parallel … --fix {what}=1",
            )
    if config.zero == 3 and config.pipeline > 1:
        raise UsageError(
            "a pipeline whose replicas divide the weights (ZeRO 3) is not run",
            hint="use zero=1 or 2, which divide the optimizer's states",
        )
    broken = next(broken_shares(config), "") if config.shares is not None else ""
    if broken:
        raise UsageError(broken, hint="give one share per replica")


def _warn_of_memory(config: ParallelConfig) -> None:
    """What only saves memory is left out: numbers are the same, and more is held than planned."""
    left_out = [
        what
        for what, is_planned in (
            ("recomputation of attention alone", config.recompute == "selective"),
            ("sequence parallelism", config.sequence_parallel),
        )
        if is_planned
    ]
    if left_out:
        warnings.warn(
            f"{' and '.join(left_out)} of the plan is not applied to your module: its numbers are "
            "the same, and it holds more activations than planned",
            ParallelWarning,
            WARNED_LEVEL,
        )


def _warn_of_counts(batch: Any, count: Count | None) -> None:
    if count is None and ignored_labels(batch):
        warnings.warn(
            "some labels are -100, so a mean over tokens weighs samples differently than replicas "
            "do; say what counts: count=lambda batch: (batch['labels'][:, 1:] != -100).sum()",
            ParallelWarning,
            WARNED_LEVEL,
        )


def _warn_of_norms(model: nn.Module) -> None:
    norms = batch_norms_in_training(model)
    if norms:
        warnings.warn(
            f"batch norm {norms[0]!r} normalises each microbatch by itself, as with accumulated "
            "gradients in PyTorch: numbers differ from those of the whole batch at once",
            ParallelWarning,
            WARNED_LEVEL,
        )
