"""Training of a plan's model on synthetic batches, with the strategies of `hocket.prepare`.

`hocket run` and its ranks use it. `transformer_training` trains the built-in transformer model on
synthetic text.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.capture.fake import batch_tensors
from hocket.capture.given import loss_and_forward
from hocket.capture.loss import Loss
from hocket.capture.model import CaptureWarning
from hocket.capture.optimizer import Optimizer, optimizer_of_meta
from hocket.capture.perform import draw_seed
from hocket.plan.files import SavedPlan
from hocket.plan.sections import Memory, Waves
from hocket.plan.training import TransformerTraining
from hocket.runtime.offload.budgeted_model import BudgetedModel
from hocket.runtime.planned_optimizer import torch_optimizer, trained_parameters
from hocket.runtime.prepare import choose_strategy
from hocket.runtime.step_record import StepRecord
from hocket.runtime.strategies.parallel_task import ParallelWarning
from hocket.runtime.strategies.traced import TracedModel
from hocket.runtime.strategy import LoopOptions, TrainingTask
from hocket.runtime.trace_options import TraceOptions
from hocket.runtime.training_loop import TrainingLoop
from hocket.runtime.transformer_model import built_in_model, token_batch


class SyntheticModel(NamedTuple):
    """A model with random weights, and its synthetic batches."""

    module: nn.Module
    make_batch: Callable[[int], Any]
    """Returns the batch of a step."""
    loss: Loss | str | None = None
    name: str = ""


class SyntheticTraining:
    """Training of a model on synthetic batches under a plan; each rank of the plan has one."""

    def __init__(
        self,
        saved: SavedPlan,
        synthetic: SyntheticModel,
        device: torch.device,
        *,
        seed: int = 0,
        update: Optimizer | None = None,
        is_ranked: bool = False,
    ) -> None:
        """``device`` is the device of this process; ``update`` replaces the plan's optimizer."""
        meta = (
            {} if isinstance(saved.problem.work, TransformerTraining) else saved.problem.graph.meta
        )
        model, self._make_batch, loss, name = synthetic
        self._update = update or optimizer_of_meta(meta)
        if self._update is None:
            # A plan of inference; the loop needs an optimizer that changes nothing.
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        else:
            self.optimizer = torch_optimizer(self._update, trained_parameters(self._update, model))
        # Kernels are those of the planned device, also if another device runs them.
        kernels = str(meta.get("device") or device.type)
        # Steps under these sections draw from PyTorch's generator, so `step` seeds it.
        self._is_seeded = any(saved.plan.get(kind) is not None for kind in (Memory, Waves))
        self._seed = seed
        batch = self._make_batch(1)
        loss, forward = loss_and_forward(model, batch, loss, meta.get("amp"), kernels)
        task = TrainingTask(
            model=model, optimizer=self.optimizer, batch=batch, device=device,
            recipe=TraceOptions(
                loss=loss, update=self._update, device=kernels,
                name=name or saved.problem.work_name, forward=forward,
            ),
            options=LoopOptions(seed=None if self._is_seeded else seed), is_ranked=is_ranked,
        )  # fmt: skip
        with warnings.catch_warnings():
            # The warnings concern real training only, for example batch norms per microbatch.
            warnings.simplefilter("ignore", ParallelWarning)
            warnings.simplefilter("ignore", CaptureWarning)
            self.strategy = choose_strategy(task, saved).strategy
        self.loop = TrainingLoop(model, self.optimizer, self.strategy, task.options)
        # `hocket run` compares measured with predicted times itself.
        self.loop.watch.predicted_s = None

    def step(self, number: int, *, timed: bool = False) -> StepRecord:
        """Train one step; with ``timed`` every op is timed."""
        batch = self._make_batch(number)
        if self._is_seeded:
            torch.manual_seed(draw_seed(self._seed, number, 0))
        started_s = time.perf_counter()
        loss = self.loop.step(batch, timed=timed)
        value = None if self._update is None else float(loss)
        ended_s = time.perf_counter()
        ranked = self.strategy.record if isinstance(self.strategy, TracedModel) else None
        record = ranked or StepRecord()
        record.start_s, record.end_s, record.loss = started_s, ended_s, value
        for device, num_bytes in self.state_bytes().items():
            if device in record.peak_bytes:
                record.peak_bytes[device] += num_bytes
        return record

    def state_bytes(self) -> dict[int, int]:
        """Return the bytes of optimizer states on each device of a placement on the CPU.

        The user's optimizer holds them, so the bytes that a traced step counts do not include them.
        """
        programs = self.strategy
        if not isinstance(programs, TracedModel) or programs.devices[0].type != "cpu":
            return {}
        setup, found = programs.first.setup, {}
        for device, present in enumerate(setup.split.present):
            names = [setup.program.names.get(tensor, "") for tensor in present]
            here = [programs.tensors[name] for name in names if name in programs.tensors]
            states = [self.optimizer.state.get(tensor, {}) for tensor in here]
            found[device] = sum(
                value.nbytes for state in states for value in state.values()
                if isinstance(value, torch.Tensor)
            )  # fmt: skip
        return found

    def lasting(self) -> Iterable[torch.Tensor]:
        """Return the device tensors that outlive a step."""
        if isinstance(self.strategy, BudgetedModel):
            rows = [tensor for _, tensor in batch_tensors(self._make_batch(1))]
            return (*self.strategy.lasting, *rows)
        return (*self.loop.model.parameters(), *self.loop.model.buffers())


def transformer_training(
    saved: SavedPlan,
    device: torch.device,
    *,
    seed: int,
    dtype: torch.dtype,
    update: Optimizer | None = None,
) -> SyntheticTraining:
    """Train the built-in model of a plan's shape on synthetic text; all ranks call it together."""
    shape, num_samples = saved.problem.training.model, saved.problem.training.global_batch

    def make_batch(number: int) -> Any:
        return token_batch(shape, range(num_samples), seed=seed, step=number)

    usual = Optimizer("adamw", {"lr": 1e-3, "weight_decay": 0.0})
    model = built_in_model(shape, seed=seed, dtype=dtype)
    return SyntheticTraining(
        saved, SyntheticModel(model, make_batch, name=shape.name), device,
        seed=seed, update=update or usual, is_ranked=True,
    )  # fmt: skip
