"""A step of the user's model, recorded for one shape of batch and placed as the plan says."""

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
from hocket.capture.program import Program
from hocket.capture.step import Forward, apply_model
from hocket.capture.trouble import UntraceableError
from hocket.graph.graph import Graph
from hocket.runtime.train.traced_recompute import RecomputedBlocks, with_recompute

Kind = Literal["train", "evaluate", "predict"]
"""A training step; the loss without gradients; what the model returns, without gradients."""


def _step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Options for tracing a step: loss, forward function, optimizer and recomputed blocks."""

    loss: Loss | str | None = None
    forward: Forward | None = None
    update: Optimizer | None
    """None for inference."""
    device: str
    """Whose kernels are recorded."""
    name: str = ""
    again: RecomputedBlocks | None = None
    """Which blocks of a training step run again for their backward pass; None for none."""
    make_update: Callable[[torch.optim.Optimizer], None] = _step
    """Function that runs a step of the user's optimizer."""

    @property
    def calls_optimizer(self) -> bool:
        """True if an update is a call of ``optimizer.step()`` and nothing else."""
        return self.make_update is _step

    def trace(
        self, model: nn.Module, batch: Any, kind: Kind, *, is_run: bool = True
    ) -> tuple[Graph, Program]:
        """The step on a batch as it is settled; neither model nor batch nor draws are changed.

        Where the program ``is_run`` in place of the model, its calls must be all that it does, and
        each is recorded; else parameters lie apart, because they come and go one by one.
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
    """The model as it trains, as it is used, or as it is (None); then as it was again."""
    before = [(module, module.training) for module in model.modules()]
    if is_training is not None:
        model.train(is_training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
