"""The loss of a captured step: the model's own, a named one, or the mean of its output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

from hocket.base.errors import UsageError, unknown_name

Loss = Callable[[Any], torch.Tensor]

OWN, MEAN = "model", "mean"
"""Names of default losses: the model's own loss, or else the mean of its output."""


def _cross_entropy(output: Any) -> torch.Tensor:
    """Cross-entropy with all labels 0; it has the same cost as with real labels."""
    logits = first_floating(output)
    rows = logits.reshape(-1, logits.shape[-1])
    return functional.cross_entropy(rows.float(), rows.new_zeros(len(rows), dtype=torch.long))


def _squares(output: Any) -> torch.Tensor:
    return first_floating(output).square().mean()


def _mean(output: Any) -> torch.Tensor:
    return first_floating(output).mean()


LOSSES: Mapping[str, Loss] = {"cross-entropy": _cross_entropy, "mse": _squares, MEAN: _mean}
"""Losses by name: cross-entropy against class 0, squared error against zeros, sum and mean of
outputs."""


class ChosenLoss:
    """A loss that records, when it is first called, which default it used."""

    def __init__(self, loss: Loss | str | None) -> None:
        self.name = ""
        """`OWN`, a name of `LOSSES`, or ``package.module:function``."""
        self.given = find_loss(loss) if isinstance(loss, str) and loss != OWN else loss
        self._given_name = loss if isinstance(loss, str) else _name_of(loss)

    def __call__(self, output: Any) -> torch.Tensor:
        """Return the scalar to minimize."""
        if self.given is not None and not isinstance(self.given, str):
            value: Any = self.given(output)
            self.name = self._given_name
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise UsageError(
                    "the loss function must return a tensor with one element",
                    hint="end it with .mean() or .sum()",
                )
            return value
        own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        self.name = OWN
        if isinstance(own, torch.Tensor):
            return own
        first = first_floating(output)
        if first.numel() == 1:
            return first
        self.name = MEAN
        return first.mean()


def find_loss(name: str) -> Loss:
    """Find a loss by name: one of `LOSSES`, or a user function ``package.module:function``."""
    if ":" in name:
        from hocket.capture.zoo.load import find_function

        found: Loss = find_function(name)
        return found
    if name not in LOSSES:
        raise unknown_name("loss", name, [*LOSSES, "package.module:function"])
    return LOSSES[name]


def describe_loss(name: str) -> str:
    """Description of a loss for messages."""
    known = {
        OWN: "the model's own",
        MEAN: "the mean of the model's output, since it returns no loss",
        "cross-entropy": "cross-entropy of the model's output against class 0",
        "mse": "mean square of the model's output",
    }
    return known.get(name, name)


def first_floating(output: Any) -> torch.Tensor:
    """The first floating-point tensor of a model output."""
    for tensor in tensors_of(output):
        if tensor.is_floating_point():
            return tensor
    raise UsageError(
        "the model returns no floating-point tensor to take a loss of",
        hint="pass loss=, a function from the output to a scalar",
    )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """All tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for item in output for tensor in tensors_of(item)]
    return []


def _name_of(loss: Loss | None) -> str:
    """Display name of a user's loss function; it cannot be looked up again by this name."""
    return "" if loss is None else f"function {getattr(loss, '__qualname__', type(loss).__name__)}"
