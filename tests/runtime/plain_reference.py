"""The unsplit model trained by plain PyTorch: what every placement has to reproduce.

The model itself runs, with autograd and ``torch.optim``. Only its random draws are seeded one by
one, by the rule of the runtime, since a generator that goes on from op to op would give other
numbers to ops that run elsewhere.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hocket.capture.describe import draws
from hocket.capture.loss import ChosenLoss, Loss
from hocket.capture.perform import draw_seed, seed_device
from hocket.capture.step import apply_model

_OPTIMIZERS: Mapping[str, Any] = {
    # Fused as in a captured step: the other implementations round differently.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters),
}


@dataclass(frozen=True, eq=False)
class Reference:
    """What plain training gives."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the last step, by parameter."""
    state: dict[str, torch.Tensor]
    """Parameters and buffers after the last step."""


class _SeededDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives every op that draws random numbers its own seed."""

    def __init__(self, seed: int, step: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seed, self.step, self.num_draws = seed, step, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if draws(func, args, kwargs or {}):
            tensors = [leaf for leaf in args if isinstance(leaf, torch.Tensor)]
            device = tensors[0].device if tensors else torch.device("cpu")
            seed_device(device, draw_seed(self.seed, self.step, self.num_draws))
            self.num_draws += 1
        return func(*args, **(kwargs or {}))


def reference_steps(
    model: nn.Module,
    batch: Any,
    *,
    steps: int,
    seed: int = 0,
    optimizer: str = "adamw",
    loss: Loss | None = None,
) -> Reference:
    """Train a copy of ``model`` for some steps on one batch."""
    model = copy.deepcopy(model)
    update = _OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    losses, chosen = [], ChosenLoss(loss)
    for step in range(1, steps + 1):
        update.zero_grad(set_to_none=True)
        with torch.autograd.set_multithreading_enabled(False), _SeededDraws(seed, step):
            value = chosen(apply_model(model, batch))
            value.backward()  # type: ignore[no-untyped-call]
        update.step()
        losses.append(float(value.detach()))
    return Reference(
        losses=losses,
        gradients={n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        state={n: t.detach() for n, t in (*model.named_parameters(), *model.named_buffers())},
    )
