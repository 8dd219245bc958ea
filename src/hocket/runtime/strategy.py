"""The interface of strategies, which execute a plan in a training loop.

A strategy computes losses and gradients of batches on the devices of its plan. It adds gradients to
``parameter.grad``, so the user's optimizer, gradient clipping and schedulers work as in plain
PyTorch. Losses and weights equal those of training in one process, bit for bit if sums have the
same order. Strategies that run a part of a batch (a replica, a stage, a microbatch) are nested in
strategies that split the batch. The file also defines the input (`TrainingTask`, `LoopOptions`) and
the output (`Prepared`) of the choice of a strategy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.plan.files import SavedPlan
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.runtime.batches import Padding
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.launch import used_devices
from hocket.runtime.strategies.batch_split import Count
from hocket.runtime.strategies.parallel_state import ParallelState
from hocket.runtime.trace_options import TraceOptions, Weight
from hocket.simulate import simulate
from hocket.simulate.timeline import Timeline


class StepOutput(NamedTuple):
    """Loss and outputs of a batch."""

    loss: torch.Tensor
    outputs: Any
    """Outputs of the model; tensors that were not kept are None."""


class Timings(NamedTuple):
    """Predicted and measured timeline of a step."""

    problem: Problem
    plan: Plan
    predicted: Timeline
    measured: Timeline


class Strategy(ABC):
    """Computes losses and gradients according to a plan, and steps the user's optimizer."""

    tensors: Mapping[str, torch.Tensor]
    """The model's tensors by name."""
    predicted_s: float | None = None
    """Predicted step time in seconds; None if the devices in use are not those of the plan."""
    lost: str = ""
    """Parts of the plan that cannot be applied to the model; empty if there are none."""
    rank_state: ParallelState | None = None
    """Joins and splits the state of the training, if ranks hold parts of the model."""
    computed_s: float | None = None
    """Seconds that this rank computed in the last timed step, if ranks hold parts of the model."""

    @property
    def replays(self) -> str:
        """Description of how the next step is launched; empty if that is unknown."""
        return ""

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Announce the optimizer that is stepped after the next batch, or None.

        The strategy may then update parameters as their gradients arrive. By default updates wait
        for all gradients.
        """
        return

    @abstractmethod
    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Return the loss of a batch, and add ``weight`` times its gradients to ``.grad``."""

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """Train like `train`, and time every op if the strategy can."""
        return self.train(batch, step, weight), None

    def forward(self, batch: Any, step: int) -> StepOutput:
        """Return the loss of a batch, for the user's own ``backward()``; refused by default."""
        raise UsageError(
            "the plan runs forward and backward passes as one list of instructions",
            hint="call train.step(batch) instead of loss.backward() and optimizer.step()",
        )

    @abstractmethod
    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss of a batch in evaluation mode."""

    @abstractmethod
    def predict(self, batch: Any) -> Any:
        """Return the model's outputs in evaluation mode."""

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer for all parameters that were not updated during `train`."""
        optimizer.step()

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of all parameters by their common norm."""
        nn.utils.clip_grad_norm_(
            [tensor for tensor in self.tensors.values() if isinstance(tensor, nn.Parameter)],
            max_norm,
        )

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Finish pending sums and updates, so that parameters and states can be read."""
        return

    def feed(self, reducer: GradientReducer) -> None:
        """Pass gradients to a reducer as they are computed; by default autograd's hooks do."""
        reducer.watch_autograd()

    def set_requires_gradient_sync(self, is_required: bool) -> None:
        """With False, more batches of the same update follow the next one (as in FSDP2)."""
        return


def innermost(strategy: Any) -> Any:
    """Return the strategy that calls the model, inside of strategies that split a batch."""
    while hasattr(strategy, "inner"):
        strategy = strategy.inner
    return strategy


class Correction(Protocol):
    """A choice of strategy that the first steps correct once."""

    is_over: bool

    def note(self, step_s: float) -> Strategy | None:
        """Record the time of a step; return the strategy to switch to, or None."""


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of the training loop."""

    accumulate: int = 1
    """Batches per update; the loss of each batch is divided by this number."""
    clip_norm: float | None = None
    """Maximum norm of all gradients together; None for no clipping."""
    seed: int | None = None
    """Seed of random draws, per step and op; None continues PyTorch's generator."""
    outputs: bool = False
    """True if all outputs of the model are kept, not only single numbers."""
    max_shapes: int = 8
    """Number of batch shapes of each kind that are traced."""
    pad: Padding | None = None
    """Pads each batch to one of few shapes."""
    replay: bool = True
    """True if a step on one CUDA device is replayed as a CUDA graph."""
    async_update: bool = False
    """True if updates on the host may overlap with the next step, within a memory budget.

    Parameters that are read between steps may then not be updated yet; ``state_dict()`` waits.
    """


class Prepared(NamedTuple):
    """A strategy, the plan that it executes, and the predicted step time."""

    strategy: Strategy
    plan: Plan
    step_s: float | None
    """Predicted step time on the plan's devices, whatever devices are in use; None if unknown."""
    searched: SavedPlan | None = None
    """The searched placement on several devices of this process; None if no search was made."""
    correction: Correction | None = None
    """Replaces the memory plan if the first steps show that another one is faster."""


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """Model, optimizer, batch and options of a training: the input of every strategy."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    """The global batch of all ranks."""
    recipe: TraceOptions
    options: LoopOptions
    device: torch.device
    """Device of this process."""
    is_ranked: bool = False
    """True if several ranks run."""
    count: Count | None = None
    weights: str | Path | None = None
    reduce_dtype: torch.dtype | None = None


def predicted_s(problem: Problem, plan: Plan, device: torch.device) -> float | None:
    """Return the predicted step time; None if the plan's devices are only emulated."""
    return None if is_emulated(problem, plan, device) else claimed_step_s(problem, plan)


def claimed_step_s(problem: Problem, plan: Plan) -> float:
    """Return the plan's steady-state step time, else its single-step time, else a simulated one."""
    claims = plan.claims
    for known_s in (claims.repeated_step_s, claims.step_s):
        if known_s is not None:
            return known_s
    return simulate(problem, plan).makespan_s


def is_emulated(problem: Problem, plan: Plan, device: torch.device) -> bool:
    """True if CPUs take the place of the plan's GPUs, or GPUs the place of its CPUs."""
    kinds = {each.name: each.kind for each in problem.cluster.devices}
    is_cpu = device.type == "cpu"
    return any(kinds[name].is_cpu != is_cpu for name in used_devices(problem, plan))
