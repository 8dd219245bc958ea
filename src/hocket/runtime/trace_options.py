"""Trace a step of the user's model: options of the trace, loss weights, state of autocast.

`TraceOptions.trace` captures a training, evaluation or prediction step as graph and program, with
recomputed blocks if chosen. A loss weight multiplies the first gradient of the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from hocket.capture.loss import ChosenLoss, Loss
from hocket.capture.model import capture_program
from hocket.capture.optimizer import Optimizer
from hocket.capture.packed import masks_as_run, rows_are_whole
from hocket.capture.program import Call, Program
from hocket.capture.step import Forward, apply_model
from hocket.capture.trouble import UntraceableError
from hocket.graph.graph import Graph, Phase
from hocket.runtime.traced_recompute import RecomputedBlocks, with_recompute

Kind = Literal["train", "evaluate", "predict"]
"""Type of step: training; loss without gradients; model outputs without gradients."""


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Options for tracing a step: loss, forward function, optimizer and recomputed blocks."""

    loss: Loss | str | None = None
    forward: Forward | None = None
    update: Optimizer | None
    """Optimizer of the step; None for inference."""
    device: str
    """Device type whose kernels are recorded."""
    name: str = ""
    again: RecomputedBlocks | None = None
    """Chooses the blocks of a training step to recompute; None for no recompute."""
    make_update: Callable[[torch.optim.Optimizer], None] = _step
    """Runs a step of the user's optimizer."""

    @property
    def calls_optimizer(self) -> bool:
        """True if an update is a call of ``optimizer.step()`` and nothing else."""
        return self.make_update is _step

    def trace(
        self, model: nn.Module, batch: Any, kind: Kind, *, is_run: bool = True
    ) -> tuple[Graph, Program]:
        """Trace a step on a settled batch; model, batch and random generators do not change.

        With ``is_run`` the program will run in place of the model, so an incomplete trace is
        refused. Otherwise parameters get separate memory, because offload moves them one by one.
        """
        forward, update = self.forward, self.update if kind == "train" else None
        if kind == "evaluate":
            forward = self._with_loss
        as_called: AbstractContextManager[None] = nullcontext()
        if self.forward is None:
            as_called = masks_as_run(batch) if is_run else rows_are_whole(batch)
        with in_mode(model, is_training=None if kind == "train" else False), as_called:
            graph, program = capture_program(
                model, batch, loss=self.loss, optimizer=update,
                device=self.device, forward=forward, name=self.name, in_one_piece=is_run,
            )  # fmt: skip
        if is_run and program.unseen:
            raise UntraceableError(f"a recorded step does not show all: {program.unseen}")
        if self.again is None or kind != "train":
            return graph, program
        return with_recompute(graph, program, self.again(graph, program))

    def _with_loss(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        returned = (self.forward or apply_model)(model, batch)
        return {"loss": ChosenLoss(self.loss)(returned), "returned": returned}


@contextmanager
def in_mode(model: nn.Module, *, is_training: bool | None) -> Iterator[None]:
    """Switch a model to training or evaluation mode and back; None leaves its mode unchanged."""
    before = [(module, module.training) for module in model.modules()]
    if is_training is not None:
        model.train(is_training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


# State of autocast.


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return autocast's type on a device type, such as ``cuda``; None where it is off."""
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def autocast_state() -> tuple[tuple[str, torch.dtype], ...]:
    """Return the device types with enabled autocast and its dtype, on which traced steps depend.

    Autocast's cache is left out, because it does not change results.
    """
    found = ((kind, autocast_dtype(kind)) for kind in ("cpu", "cuda"))
    return tuple((kind, dtype) for kind, dtype in found if dtype is not None)


# Weights of a loss, which multiply the first gradient of a backward pass.
#
# Microbatches of an accumulated batch weight the loss by their fraction of the batch, and losses of
# 16-bit models are scaled up against underflow. Both multiply the gradient of the loss, as autograd
# would.

Weight = float | torch.Tensor
"""Weight of a loss: a number, or a tensor with one element if it is known only on the device."""


def starts_backward(program: Program, call: Call) -> bool:
    """True if a call creates the first gradient of the backward pass, a tensor of ones."""
    is_first = call.phase == Phase.BACKWARD and call.cost.kind == "aten.ones_like"
    return is_first and bool(program.outputs) and call.reads == (program.outputs[0],)
