"""Replicas whose gradients travel by priority: the next step begins while sums are under way.

Gradients are handed over as backward makes them, and every layer of the next forward pass waits for
its own (`hocket.runtime.collectives.priority_sync`). That works by hooks of modules and parameters,
so the model itself is run, not a recorded step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.runtime.collectives.priority_sync import Propagation
from hocket.runtime.task import LoopOptions
from hocket.runtime.train.divided.replicas import Replicas


class PrioritisedReplicas(Replicas):
    """Replicas that never wait for all sums at once; see `Strategy`."""

    _has_reducer = False

    def __init__(self, propagation: Propagation, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._propagation = propagation

    def _own(self, batch: Any) -> tuple[Any, float]:
        # Propagation takes the mean over ranks, and fractions are of a sum.
        rows, fraction = super()._own(batch)
        return rows, fraction * len(self._shares)

    def _whole_loss(
        self, loss: torch.Tensor, fraction: float, *, is_async: bool = False
    ) -> torch.Tensor:
        return super()._whole_loss(loss, fraction / len(self._shares))

    @contextmanager
    def _syncing(self) -> Iterator[None]:
        """Send gradients as they come within, where no batch of this update follows."""
        if self._is_last:
            yield
        else:
            with self._propagation.no_sync():
                yield

    def _begin(self) -> None:
        """Gradients of before are under way; none is left here."""

    def _agree(self) -> None:
        """Sums are made while others compute."""

    def clip(self, max_norm: float) -> None:
        """Not possible: no gradient is whole before the next step begins."""
        raise UsageError(
            "gradients that travel by priority cannot be clipped by their common norm",
            hint="plan without the section priority, or leave clipping out",
        )

    def gathered(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """The state as one process would have it, with all sums in it."""
        self._propagation.finish()
        return super().gathered(optimizer, pending=False)

    def parts(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """What this rank keeps of a state that all ranks write together, with all sums in it."""
        self._propagation.finish()
        return super().parts(optimizer, pending=False)

    def take(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load a state; sums of before are done with first."""
        self._propagation.finish()
        super().take(state, optimizer)


def hindrance(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: LoopOptions,
) -> str:
    """Why gradients cannot travel by priority here; empty where they can."""
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    reasons = {
        "they are clipped by their common norm": options.clip_norm is not None,
        "some weights have no memory yet": any(p.is_meta for p in trained),
        "the optimizer updates other weights than the model trains": updated != trained,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
