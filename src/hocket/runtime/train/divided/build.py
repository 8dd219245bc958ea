"""From a division to what carries a person's module: tensor, pipeline and data parallel in turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.plan.sections import Schedule
from hocket.planners.parallelism.schedules import make_schedule
from hocket.runtime.train.batches import settled
from hocket.runtime.train.carrier import Carrier, Passes
from hocket.runtime.train.cuts import TensorCut
from hocket.runtime.train.divided.agreement import require_same_everywhere, share_weights
from hocket.runtime.train.divided.hollow import fill_hollow
from hocket.runtime.train.divided.mesh import Mesh
from hocket.runtime.train.divided.norms import batch_norms_in_training, join_batch_norms
from hocket.runtime.train.divided.piece import Cutting
from hocket.runtime.train.divided.replicas import Replicas
from hocket.runtime.train.divided.sharded import ShardedModel
from hocket.runtime.train.divided.shares import (
    Count,
    ignored_labels,
    num_rows,
    shared_rows,
    take_rows,
)
from hocket.runtime.train.divided.stack import find_stack, stage_layers
from hocket.runtime.train.divided.staged import Pipeline
from hocket.runtime.train.divided.tensor import divide_layers
from hocket.runtime.train.recorded import Recipe
from hocket.transformer import Division
from hocket.transformer.rules import broken_shares

MakeInner = Callable[[Any], Passes]
"""The carrier of the model on one device for batches like the given one."""


class DivisionWarning(UserWarning):
    """A division is not carried out as someone may expect."""


def divided_carrier(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    division: Division,
    schedule: Schedule | None,
    device: torch.device,
    recipe: Recipe,
    make_inner: MakeInner,
    *,
    seed: int,
    count: Count | None,
    max_shapes: int,
    weights: str | Path | None,
) -> Carrier:
    """Carry the model by all ranks of a division; each calls this with the same batch."""
    _refuse(division)
    _warn_of_memory(division)
    mesh = Mesh(division, device)
    require_same_everywhere(model, device)
    share_weights(model, device)
    shares = division.shares or (1,) * division.data
    own = shared_rows(num_rows(batch), shares)[mesh.data_rank]
    if division.data > 1:
        join_batch_norms(model, mesh.data_group)
        _warn_of_counts(batch, count)
    cuts: Mapping[int, TensorCut] = {}
    if division.tensor > 1:
        cuts = divide_layers(model, mesh.tensor_group, mesh.tensor_rank, division.tensor)
    if division.pipeline == 1:
        fill_hollow(model, weights, _always, cuts, mesh)
    rows = settled(take_rows(batch, own))
    inner: Passes
    stage_of: Callable[[torch.Tensor], int] = _on_the_first
    refresh: Callable[[], None] = _nothing
    if division.pipeline > 1:
        _refuse_batch_norms(model)
        schedule = schedule or _schedule(division)
        inner = pipeline = Pipeline(
            model, rows, recipe, _cutting(model, division, schedule), schedule, mesh,
            seed=seed, count=count, max_shapes=max_shapes,
        )  # fmt: skip
        fill_hollow(model, weights, pipeline.is_needed, cuts, mesh)
        stage_of, refresh = pipeline.stage_of, pipeline.refresh
        pipeline.settle()
    elif division.zero == 3 and division.data > 1:
        named = {name: cuts.get(id(parameter)) for name, parameter in model.named_parameters()}
        inner = ShardedModel(model, optimizer, recipe, mesh.axes["dp"])
        # Parts of parameters have taken the place of parameters.
        now = dict(model.named_parameters())
        cuts = {id(now[name]): cut for name, cut in named.items() if cut is not None}
    else:
        inner = make_inner(rows)
    return Replicas(
        inner, model, mesh, shares=shares, count=count, seed=seed,
        reduces=division.zero != 3,
        cuts=cuts, stage_of=stage_of, refresh=refresh, predicted_s=None,
    )  # fmt: skip


def _on_the_first(tensor: torch.Tensor) -> int:
    return 0


def _always(tensor: torch.Tensor) -> bool:
    return True


def _nothing() -> None:
    """Every weight is updated where it is used."""


def _cutting(model: nn.Module, division: Division, schedule: Schedule) -> Cutting:
    stack, num_layers = find_stack(model)
    stages = stage_layers(num_layers, division.layers, division.num_stages)
    return Cutting(stack, tuple(stages), tuple(schedule.device_of_stage.tolist()))


def _schedule(division: Division) -> Schedule:
    """The named schedule of a division."""
    return make_schedule(
        division.schedule, division.pipeline, division.num_microbatches, division.chunks
    )


def _refuse_batch_norms(model: nn.Module) -> None:
    norms = batch_norms_in_training(model)
    if norms:
        raise UsageError(
            f"batch norm {norms[0]!r} would see single microbatches of a pipeline, which is "
            "another training",
            hint="plan data parallelism, where it sees the whole batch, or use another norm",
        )


def require_layers(model: nn.Module, planned: int) -> None:
    """Refuse a model of another number of layers than was planned."""
    path, found = find_stack(model)
    if found != planned:
        raise UsageError(
            f"the plan divides {planned} layers, and {path or type(model).__name__} has {found}",
            hint="plan this very model",
        )


def require_batch(division: Division, batch: Any) -> None:
    """Refuse a batch of another size than was planned."""
    if num_rows(batch) != division.global_batch:
        raise UsageError(
            f"the plan is for {division.global_batch} samples per step, the batch has "
            f"{num_rows(batch)}",
            hint="give the whole batch of all ranks, or plan for this size",
        )


def _refuse(division: Division) -> None:
    for degree, what in ((division.context, "context"), (division.expert, "expert")):
        if degree > 1:
            raise UsageError(
                f"{what} parallelism is planned and predicted but not carried out",
                hint=f"plan without it: hocket parallel … --fix {what}=1",
            )
    if division.zero == 3 and division.pipeline > 1:
        raise UsageError(
            "a pipeline whose replicas divide the weights (ZeRO 3) is not carried out",
            hint="use zero=1 or 2, which divide the optimizer's states",
        )
    broken = next(broken_shares(division), "") if division.shares is not None else ""
    if broken:
        raise UsageError(broken, hint="give one share per replica")


def _warn_of_memory(division: Division) -> None:
    """What only saves memory is left out: numbers are the same, and more is held than planned."""
    left_out = [
        what
        for what, is_planned in (
            (f"recomputation ({division.recompute})", division.recompute != "none"),
            ("sequence parallelism", division.sequence_parallel),
        )
        if is_planned
    ]
    if left_out:
        warnings.warn(
            f"{' and '.join(left_out)} of the plan is not applied to your module: its numbers are "
            "the same, and it holds more activations than planned",
            DivisionWarning,
            6,
        )


def _warn_of_counts(batch: Any, count: Count | None) -> None:
    if count is None and ignored_labels(batch):
        warnings.warn(
            "some labels are -100, so a mean over tokens weighs samples differently than replicas "
            "do; say what counts: count=lambda batch: (batch['labels'][:, 1:] != -100).sum()",
            DivisionWarning,
            6,
        )
