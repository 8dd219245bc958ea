"""One replica's part of a step: its microbatches, their gradients added up, and the update.

The loss of a microbatch of n of B samples counts n / B, so that sums over microbatches and replicas
are the mean over the whole batch, and the update is that of one device with the whole batch up to
rounding. Two things are not the same: batch norm sees the statistics of a microbatch, as in PyTorch
with accumulation or DistributedDataParallel, and dropout draws other masks of the same
distribution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hocket.capture.fake import batch_tensors, map_batch
from hocket.capture.loss import ChosenLoss, Loss
from hocket.capture.optimizer import Optimizer
from hocket.capture.perform import draw_seed
from hocket.capture.step import apply_model
from hocket.runtime.collectives.reducer import GradientReducer
from hocket.runtime.record import StepRecord
from hocket.runtime.shared.job import PER_MICROBATCH
from hocket.runtime.shared.rows import Rows


class ReplicaTrainer:
    """A model that is trained on some rows of each batch."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: Loss | str | None,
        update: Optimizer,
        microbatches: Sequence[Rows],
        *,
        num_samples: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self.model = model.to(device).train()
        self.device, self.seed, self.num_samples = device, seed, num_samples
        self._loss = ChosenLoss(loss)
        self._microbatches = microbatches
        self._parts = [_rows_of(batch, rows, num_samples, device) for rows in microbatches]
        self._parameters = trained_parameters(update, self.model)
        self._optimizer = torch_optimizer(update, self._parameters)
        self._marks = _Marks(self.model, self._parameters)
        self._reducer: GradientReducer | None = None
        if dist.is_initialized():
            self._reducer = GradientReducer([(None, self._parameters)])
            self._reducer.watch_autograd()

    def step(
        self, number: int, on_move: Callable[[int, int], None] = lambda step, done: None
    ) -> StepRecord:
        """Forward and backward of all microbatches, the exchange, the update.

        ``on_move`` is told the step and how far it is, a microbatch counting as `PER_MICROBATCH`.
        """
        record = StepRecord(start_s=time.perf_counter())
        self._optimizer.zero_grad(set_to_none=True)
        if self._reducer is not None:
            self._reducer.begin()
        total = torch.zeros((), device=self.device)
        for index, (rows, part) in enumerate(zip(self._microbatches, self._parts, strict=True)):
            self._marks.begin(partial(_tell_part, on_move, number, index))
            # Draws depend on the rows alone, so that it does not matter who takes them.
            torch.manual_seed(draw_seed(self.seed, number, rows.start))
            value = self._loss(apply_model(self.model, part))
            weighted = value * ((rows.stop - rows.start) / self.num_samples)
            if self._reducer is not None:
                self._reducer.is_enabled = index + 1 == len(self._parts)
            weighted.backward()  # type: ignore[no-untyped-call]
            total += weighted.detach()
        if self._reducer is not None:
            self._reducer.finish()
            dist.all_reduce(total)
        self._optimizer.step()
        record.loss = float(total)
        record.end_s = time.perf_counter()
        return record


class _Marks:
    """How far a microbatch is: modules that ran forward, weights that have their gradient."""

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        modules = [
            m for m in model.modules() if next(m.parameters(recurse=False), None) is not None
        ]
        self._total = max(len(modules) + len(parameters), 1)
        self._passed = 0
        self._tell: Callable[[int], None] = lambda part: None
        for module in modules:
            module.register_forward_hook(lambda *_: self._pass())
        for parameter in parameters:
            watched: Any = parameter
            watched.register_post_accumulate_grad_hook(lambda _: self._pass())

    def begin(self, tell: Callable[[int], None]) -> None:
        """A microbatch begins; ``tell`` is told how much of it is done, of `PER_MICROBATCH`."""
        self._passed, self._tell = 0, tell
        tell(0)

    def _pass(self) -> None:
        self._passed += 1
        # A module may run several times.
        self._tell(min(PER_MICROBATCH * self._passed // self._total, PER_MICROBATCH - 1))


def _tell_part(on_move: Callable[[int, int], None], step: int, microbatch: int, part: int) -> None:
    on_move(step, microbatch * PER_MICROBATCH + part)


def _rows_of(batch: Any, rows: Rows, num_samples: int, device: torch.device) -> Any:
    """A part of a batch; tensors without a row per sample are in every part."""
    parts: dict[int, torch.Tensor] = {}
    for _, tensor in batch_tensors(batch):
        has_rows = tensor.dim() > 0 and tensor.shape[0] == num_samples
        parts[id(tensor)] = (tensor[rows.start : rows.stop] if has_rows else tensor).to(device)
    return map_batch(batch, parts)


def trained_parameters(update: Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """Parameters of a model that a captured update changes."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (update.only is None or name in update.only)
    ]


def torch_optimizer(update: Optimizer, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of ``torch.optim`` that a captured update stands for."""
    settings = update.all_settings
    if update.name in ("adamw", "adam"):
        kind = torch.optim.AdamW if update.name == "adamw" else torch.optim.Adam
        return kind(
            parameters, lr=settings["lr"], betas=(settings["beta1"], settings["beta2"]),
            eps=settings["eps"], weight_decay=settings["weight_decay"], fused=True,
        )  # fmt: skip
    return torch.optim.SGD(
        parameters, lr=settings["lr"], weight_decay=settings["weight_decay"],
        momentum=settings.get("momentum", 0.0),
    )  # fmt: skip
