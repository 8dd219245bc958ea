"""What carries the steps of a loop: a recorded program, or the model itself with moved modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch

from hocket.runtime.train.weight import Weight


class Carried(NamedTuple):
    """What came out of a batch."""

    loss: torch.Tensor
    outputs: Any
    """What the model returned, as far as it was kept."""


class Carrier(Protocol):
    """Computes losses and gradients where a plan says; updates are not its work."""

    tensors: Mapping[str, torch.Tensor]
    """The model's tensors by name."""
    lost: str
    """What the plan cannot do here, for people; empty where it does everything."""

    def train(self, batch: Any, step: int, weight: Weight) -> Carried:
        """The loss of a batch; ``weight`` times its gradients are added to the parameters'."""

    def forward(self, batch: Any, step: int) -> Carried:
        """The loss of a batch, whose ``backward()`` adds the gradients."""

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of all parameters, wherever they are, by their common norm."""

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the newest weights and states here, also those that other processes have."""

    def evaluate(self, batch: Any) -> Carried:
        """The loss of a batch in evaluation mode."""

    def predict(self, batch: Any) -> Any:
        """What the model returns in evaluation mode."""
