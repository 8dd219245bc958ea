"""From a division to what carries a person's module: tensor, pipeline and data parallel in turn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.plan.sections import Schedule
from hocket.planners.parallelism.schedules import make_schedule
from hocket.runtime.train.batches import settled
from hocket.runtime.train.carrier import Carrier
from hocket.runtime.train.cuts import TensorCut
from hocket.runtime.train.divided.agreement import require_same_everywhere, share_weights
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

MakeInner = Callable[[Any], Carrier]
"""The carrier of the model on one device for batches like the given one."""


class UnequalCountWarning(UserWarning):
    """Samples count differently, and the replicas were not told so."""


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
    predicted_s: float | None,
) -> Carrier:
    """Carry the model by all ranks of a division; each calls this with the same batch."""
    _refuse(division)
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
    rows = settled(take_rows(batch, own))
    inner: Carrier
    stage_of: Callable[[torch.Tensor], int] = _on_the_first
    refresh: Callable[[], None] = _nothing
    if division.pipeline > 1:
        _refuse_batch_norms(model)
        inner = pipeline = Pipeline(
            model, rows, recipe, _cutting(model, division), schedule or _schedule(division), mesh,
            seed=seed, count=count, max_shapes=max_shapes,
        )  # fmt: skip
        stage_of, refresh = pipeline.stage_of, pipeline.refresh
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
        cuts=cuts, stage_of=stage_of, refresh=refresh, predicted_s=predicted_s,
    )  # fmt: skip


def _on_the_first(tensor: torch.Tensor) -> int:
    return 0


def _nothing() -> None:
    """Every weight is updated where it is used."""


def _cutting(model: nn.Module, division: Division) -> Cutting:
    stack, num_layers = find_stack(model)
    stages = stage_layers(num_layers, division.layers, division.num_stages)
    homes = _schedule(division).device_of_stage
    return Cutting(stack, tuple(stages), tuple(homes.tolist()))


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


def _warn_of_counts(batch: Any, count: Count | None) -> None:
    if count is None and ignored_labels(batch):
        warnings.warn(
            "some labels are -100, so a mean over tokens weighs samples differently than replicas "
            "do; say what counts: count=lambda batch: (batch['labels'][:, 1:] != -100).sum()",
            UnequalCountWarning,
            6,
        )
