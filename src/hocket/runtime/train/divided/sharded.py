"""Data parallelism that divides the weights as well (ZeRO 3), by PyTorch's FSDP2.

Every layer of the model is a unit whose weights are gathered when it is used and given back after.
FSDP2 works by hooks of modules, so the model itself is run, not a recorded step. It puts parts of
parameters in the place of parameters; the person's optimizer is told of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)

from hocket.base.errors import UsageError
from hocket.capture.fake import model_tensors
from hocket.capture.loss import ChosenLoss
from hocket.capture.step import apply_model
from hocket.runtime.memory.again import computed_again
from hocket.runtime.train.carrier import Carried, Timings
from hocket.runtime.train.divided.stack import layer_paths
from hocket.runtime.train.modules import detached
from hocket.runtime.train.recorded import Recipe, in_mode
from hocket.runtime.train.weight import Weight


class _Applied(nn.Module):
    """A model with how it is applied, so that hooks see every way of using it."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.model, self._apply_to = model, recipe.forward or apply_model

    def forward(self, batch: Any) -> Any:
        return self._apply_to(self.model, batch)


class ShardedModel:
    """A model whose weights are divided over replicas; see `Passes`."""

    predicted_s: float | None = None
    lost = ""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        axis: Any,
        *,
        again: Sequence[str] = (),
        is_offloaded: bool = False,
    ) -> None:
        """``axis`` is the mesh of the replicas; modules named in ``again`` keep their input alone.

        Where weights are offloaded, parts of them and the optimizer's states live on the host.
        """
        before = {id(parameter): name for name, parameter in model.named_parameters()}
        _refuse_states(optimizer)
        for path in again:
            _compute_again(model.get_submodule(path))
        policy = CPUOffloadPolicy() if is_offloaded else OffloadPolicy()
        for path in layer_paths(model):
            layer = model.get_submodule(path)
            if any(True for _ in layer.parameters()):
                fully_shard(layer, mesh=axis, offload_policy=policy)
        self._applied = _Applied(model, recipe)
        fully_shard(self._applied, mesh=axis, offload_policy=policy)
        for module in self._applied.modules():
            if isinstance(module, FSDPModule):
                # Losses are weighted by their share, so gradients are summed and not averaged.
                module.set_gradient_divide_factor(1.0)
        after = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [after[before[id(parameter)]] for parameter in group["params"]]
        self._model, self._loss = model, ChosenLoss(recipe.loss)
        self.tensors: Mapping[str, torch.Tensor] = {n: t for n, _, t in model_tensors(model)}

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Updates wait for all gradients."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer."""
        optimizer.step()

    def train(self, batch: Any, step: int, weight: Weight) -> Carried:
        """Forward and backward of the model itself."""
        outcome = self.forward(batch, step)
        seed = torch.ones_like(outcome.loss).mul_(weight)
        outcome.loss.backward(seed)  # type: ignore[no-untyped-call]
        return Carried(outcome.loss.detach(), detached(outcome.outputs))

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[Carried, Timings | None]:
        """Modules are not timed."""
        return self.train(batch, step, weight), None

    def forward(self, batch: Any, step: int) -> Carried:
        """The model itself."""
        returned = self._applied(batch)
        return Carried(self._loss(returned), returned)

    def evaluate(self, batch: Any) -> Carried:
        """The loss, without gradients."""
        with torch.no_grad(), in_mode(self._model, is_training=False):
            returned = self._applied(batch)
            return Carried(self._loss(returned), returned)

    def predict(self, batch: Any) -> Any:
        """What the model returns."""
        with torch.no_grad(), in_mode(self._model, is_training=False):
            return self._applied(batch)


def _compute_again(module: nn.Module) -> None:
    """Have a module keep its input alone, and make the rest again in the backward pass."""
    forward = module.forward

    def called(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return computed_again([module], forward, args, kwargs)

    module.forward = called


def _refuse_states(optimizer: torch.optim.Optimizer) -> None:
    if optimizer.state:
        raise UsageError(
            "the optimizer has made steps before its parameters were divided",
            hint="make a new one, and load a checkpoint after prepare",
        )
