"""``HocketTrainer``: Hugging Face's ``Trainer`` with a memory budget or a plan.

    trainer = HocketTrainer(model, arguments, train_dataset=rows, memory="8GiB")
    trainer.train()

The Trainer keeps its loop: data, schedule, accumulation, clipping, logs, evaluation, checkpoints.
hocket runs the forward and backward pass of each batch. The loss is that of ``compute_loss``, so
overrides of it, label smoothing and the token count over accumulated batches apply unchanged.
"""

# ruff: noqa: E402

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from hocket.base.errors import UsageError
from hocket.base.extras import require

require("torch", "HocketTrainer")

import torch
from torch import nn
from transformers import Trainer

from hocket.training import PlanLike, Training, prepare

__all__ = ["HocketTrainer"]


class HocketTrainer(Trainer):  # type: ignore[misc] # transformers has no type information
    """Trainer of transformers that trains within ``memory`` or by ``plan``.

    ``memory``, ``plan``, ``on`` and ``async_update`` are those of `hocket.prepare`; all other
    arguments are the Trainer's. ``self.prepared`` is the `Training` after the first batch, with
    ``plan``, ``predicted_step_s`` and, within a budget, ``memory``.
    """

    def __init__(
        self,
        *arguments: Any,
        memory: int | str | None = None,
        plan: PlanLike | None = None,
        on: str | Path = "auto",
        async_update: bool = False,
        **options: Any,
    ) -> None:
        self.prepared: Training | None = None
        self._settings: dict[str, Any] = {
            "memory": memory, "plan": plan, "on": on, "async_update": async_update,
        }  # fmt: skip
        super().__init__(*arguments, **options)
        if self.args.gradient_checkpointing and memory is not None:
            raise UsageError(
                "gradient_checkpointing=True and memory= both decide what is recomputed",
                hint="leave gradient_checkpointing out: hocket recomputes what the budget needs",
            )
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise UsageError(
                "DeepSpeed or FSDP is configured, which run the step themselves",
                hint="leave their configuration out, or use transformers.Trainer",
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator without device placement, because the model may not fit on the
        device.
        """
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: `hocket.prepare` places the parameters."""

    def training_step(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Compute the loss of a batch and add its gradients to the parameters'."""
        model.train()
        batch: dict[str, Any] = {"inputs": dict(self._prepare_inputs(inputs))}
        if num_items_in_batch is not None:
            # Passed as a tensor, because a traced step would keep a Python number of its first
            # batch.
            batch["num_items"] = torch.as_tensor(num_items_in_batch)
        if self.prepared is None:
            self.prepared = prepare(
                self.accelerator.unwrap_model(model), self._own_optimizer(), batch,
                forward=self._forward, **self._settings,
            )  # fmt: skip
        loss: torch.Tensor = self.prepared(batch)
        if not self._is_normalized(num_items_in_batch):
            loss = loss / self.current_gradient_accumulation_steps
        self.accelerator.backward(loss)
        return loss.detach()

    def _forward(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        # compute_loss may remove labels from the inputs, so it gets a copy of the dictionary.
        loss: torch.Tensor = self.compute_loss(
            model, dict(batch["inputs"]), num_items_in_batch=batch.get("num_items")
        )
        return loss

    def _own_optimizer(self) -> torch.optim.Optimizer:
        # The Accelerator wraps the optimizer that the Trainer made.
        return cast(torch.optim.Optimizer, getattr(self.optimizer, "optimizer", self.optimizer))

    def _is_normalized(self, num_items_in_batch: torch.Tensor | int | None) -> bool:
        """True if the loss is already a mean over all accumulated batches."""
        if (stated := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            return bool(stated)
        counts = self.model_accepts_loss_kwargs and num_items_in_batch is not None
        return counts or self.compute_loss_func is not None
