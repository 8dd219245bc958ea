"""Steps carried by the model itself, called as its person would call it; autograd goes back.

For what works by hooks of modules, and for models that cannot be recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from hocket.capture.fake import batch_tensors, map_batch, model_tensors
from hocket.capture.loss import ChosenLoss
from hocket.capture.step import apply_model
from hocket.runtime.strategy import StepOutput, Timings
from hocket.runtime.train.recorded import Recipe, in_mode
from hocket.runtime.train.weight import Weight


class CalledModel:
    """A model that is called for every batch; see `Passes`."""

    predicted_s: float | None = None
    lost = ""

    def __init__(
        self, model: nn.Module, recipe: Recipe, device: torch.device | None = None
    ) -> None:
        """Batches are moved to the ``device``, if one is given."""
        self._model, self._recipe, self._batch_device = model, recipe, device
        self._loss = ChosenLoss(recipe.loss)
        self.tensors: Mapping[str, torch.Tensor] = {n: t for n, _, t in model_tensors(model)}

    def _apply(self, batch: Any) -> Any:
        if self._batch_device is not None:
            moved = {
                id(tensor): tensor.to(self._batch_device) for _, tensor in batch_tensors(batch)
            }
            batch = map_batch(batch, moved)
        return (self._recipe.forward or apply_model)(self._model, batch)

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Updates wait for all gradients."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer."""
        optimizer.step()

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Forward and backward of the model."""
        outcome = self.forward(batch, step)
        seed = torch.ones_like(outcome.loss).mul_(weight)
        outcome.loss.backward(seed)  # type: ignore[no-untyped-call]
        return StepOutput(outcome.loss.detach(), detached(outcome.outputs))

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """As `train`: modules are not timed."""
        return self.train(batch, step, weight), None

    def forward(self, batch: Any, step: int) -> StepOutput:
        """What the model makes of a batch."""
        returned = self._apply(batch)
        return StepOutput(self._loss(returned), returned)

    def evaluate(self, batch: Any) -> StepOutput:
        """The loss, without gradients."""
        with torch.no_grad(), in_mode(self._model, is_training=False):
            return self.forward(batch, 0)

    def predict(self, batch: Any) -> Any:
        """What the model returns in evaluation mode."""
        with torch.no_grad(), in_mode(self._model, is_training=False):
            return self._apply(batch)


def detached(tree: Any) -> Any:
    """What a model returned, without what its gradients need."""
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)
