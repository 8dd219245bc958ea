"""``HocketStrategy``: Lightning's ``Trainer`` with a memory budget or a plan.

    trainer = lightning.Trainer(strategy=HocketStrategy(memory="8GiB"), max_steps=1000)
    trainer.fit(module, loader)

Lightning keeps its loop: data, schedule, accumulation, clipping, validation, checkpoints. hocket
runs ``training_step`` of each batch and its backward pass. A traced ``training_step`` does not
execute its Python code again, so ``self.log`` in it has no effect; log in ``on_train_batch_end``.
"""

# ruff: noqa: E402

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hocket.base.errors import UsageError
from hocket.base.extras import require

require("torch", "HocketStrategy")

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from hocket.training import PlanLike, Training, prepare

__all__ = ["HocketStrategy"]


class HocketStrategy(SingleDeviceStrategy):
    """Single-device strategy of Lightning that trains within ``memory`` or by ``plan``.

    ``memory``, ``plan``, ``on`` and ``async_update`` are those of `hocket.prepare`. ``prepared`` is
    the `Training` after the first batch.
    """

    strategy_name = "hocket"

    def __init__(
        self,
        *,
        memory: int | str | None = None,
        plan: PlanLike | None = None,
        on: str | Path = "auto",
        async_update: bool = False,
        **options: Any,
    ) -> None:
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
        super().__init__(device=device, **options)
        self.prepared: Training | None = None
        self._settings: dict[str, Any] = {
            "memory": memory, "plan": plan, "on": on, "async_update": async_update,
        }  # fmt: skip

    def model_to_device(self) -> None:
        """Do nothing: `hocket.prepare` places the parameters."""

    def training_step(self, batch: Any, *more: Any) -> torch.Tensor:
        """Compute the loss of a batch; the backward pass adds its gradients."""
        module = self.lightning_module
        assert module is not None
        if self.prepared is None:
            if not module.automatic_optimization or len(self.optimizers) != 1:
                raise UsageError(
                    "HocketStrategy needs automatic optimization with one optimizer",
                    hint="use hocket.prepare in a loop of your own",
                )
            # Prepared at the first batch, whose shapes the step is traced with.
            self.prepared = prepare(
                module, self.optimizers[0], batch, forward=self._forward, **self._settings
            )
        with _without_logs(module):
            loss: torch.Tensor = self.prepared(batch)
        return loss

    def _forward(self, module: nn.Module, batch: Any) -> torch.Tensor:
        assert isinstance(module, LightningModule)
        with _without_logs(module), self.precision_plugin.train_step_context():
            found = module.training_step(batch, 0)
        loss = found["loss"] if isinstance(found, dict) else found
        if not isinstance(loss, torch.Tensor):
            raise UsageError(
                "training_step returned no loss", hint="return a tensor, or a dict with 'loss'"
            )
        return loss

    def optimizer_step(
        self,
        optimizer: torch.optim.Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **_: Any,
    ) -> Any:
        """Run the forward and backward pass, then the update, because hocket handles them
        separately.
        """
        module = model or self.lightning_module
        result = self.precision_plugin._wrap_closure(module, optimizer, closure)  # type: ignore[arg-type]
        if result is not None:  # None: training_step skipped the batch
            optimizer.step()
        return result


@contextmanager
def _without_logs(module: LightningModule) -> Iterator[None]:
    """Disable ``self.log`` while a step is traced or run, because traced code would log only
    once."""

    def ignored(*_: Any, **__: Any) -> None:
        warnings.warn(
            "self.log in training_step does nothing under HocketStrategy: log in "
            "on_train_batch_end", stacklevel=2,
        )  # fmt: skip

    instance = vars(module)
    names = ("log", "log_dict")
    before = {name: instance[name] for name in names if name in instance}
    instance.update(dict.fromkeys(names, ignored))
    try:
        yield
    finally:
        for name in names:
            instance.pop(name)
        instance.update(before)
