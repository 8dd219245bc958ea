"""The contract of strategies, which execute a plan in a training loop.

A strategy computes losses and gradients of whole batches where its plan says, and adds gradients to
``parameter.grad``, so that the user's optimizer, clipping and schedulers work as in plain PyTorch:

* ``train`` (forward and backward at once), or ``forward`` for the user's own ``backward()``;
* ``evaluate`` and ``predict`` change nothing that is trained;
* ``update`` steps the optimizer, where ``expect`` announced it maybe earlier, gradient by gradient;
* ``gather`` brings parameters and states to this process; a strategy whose ranks hold parts of the
  model has `HoldsParts` instead, from which checkpoints of any other strategy can be made.

Numbers are those of the same training in one process: bit for bit where sums have the same order.
Optional abilities are protocols of their own below; a loop asks for them by ``isinstance``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

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
from hocket.runtime.trace_options import TraceOptions, Weight
from hocket.simulate import simulate
from hocket.simulate.timeline import Timeline


class StepOutput(NamedTuple):
    """Loss and outputs of a batch."""

    loss: torch.Tensor
    outputs: Any
    """Outputs of the model, as far as they were kept."""


class Timings(NamedTuple):
    """A step as it was predicted and as it was."""

    problem: Problem
    plan: Plan
    predicted: Timeline
    measured: Timeline


class Passes(Protocol):
    """Computes losses and gradients where a plan says, and has the optimizer use them.

    Ranks that train together compose several of these: microbatches of a stage of a replica.
    """

    tensors: Mapping[str, torch.Tensor]
    """The model's tensors by name."""
    predicted_s: float | None = None
    """Predicted step time; None where the plan's devices are emulated."""
    lost: str = ""
    """Message about what the plan cannot do here; empty where it does everything."""

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Announce the optimizer whose step follows the next batch with nothing in between, if one
        does: a strategy may update as gradients arrive. By default updates wait for all."""
        return

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, as far as that was not done as gradients arrived."""

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Return the loss of a batch; adds ``weight`` times its gradients to the parameters'."""

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """As `train`, with every op timed where that is possible; by default none is."""
        return self.train(batch, step, weight), None

    def forward(self, batch: Any, step: int) -> StepOutput:
        """Return the loss of a batch, whose ``backward()`` adds the gradients. By default refused:
        forward and backward passes of microbatches, stages or devices alternate."""
        raise UsageError(
            "the plan runs forward and backward passes as one list of instructions",
            hint="call train.step(batch) instead of loss.backward() and optimizer.step()",
        )

    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss of a batch in evaluation mode."""

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs in evaluation mode."""


class Strategy(Passes, Protocol):
    """Passes that know all ranks of the training, as the training loop needs it."""

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of all parameters, wherever they are, by their common norm."""

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the newest weights and states here that other processes have; by default none."""
        return


@runtime_checkable
class HoldsParts(Protocol):
    """A strategy whose ranks hold parts of the model, so that its state is put together."""

    computed_s: float | None
    """Seconds that this rank computed in the last timed step; None before one."""

    def gathered(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """``model``, ``optimizer`` and, where they are ``pending``, ``gradients`` of all ranks."""

    def parts(self, optimizer: torch.optim.Optimizer, *, pending: bool) -> dict[str, Any]:
        """Return this rank's part of such a state, where each rank writes its own."""

    def take(self, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part of such a state."""


@runtime_checkable
class ReportsReplay(Protocol):
    """A strategy that knows whether its steps are replayed as CUDA graphs."""

    @property
    def replays(self) -> str:
        """Describe how the next step is launched, and why not by CUDA graph replay."""


@runtime_checkable
class HasWaveState(Protocol):
    """A strategy with state of waves that outlasts a step."""

    def wave_state(self) -> dict[str, Any]:
        """Return the state to save; empty if there is none."""

    def load_wave_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state, or anew where it is empty."""


@runtime_checkable
class FeedsReducer(Protocol):
    """Passes that hand gradients over as they become final, by other means than autograd."""

    def feed(self, reducer: GradientReducer) -> None:
        """Give gradients to a reducer from the next step on."""


def feed(passes: Passes, reducer: GradientReducer) -> None:
    """Connect passes with a reducer: through `FeedsReducer`, else by hooks of autograd."""
    if isinstance(passes, FeedsReducer):
        passes.feed(reducer)
    else:
        reducer.watch_autograd()


def innermost(passes: Any) -> Any:
    """Return the passes that call the model, inside of those that split a batch."""
    while hasattr(passes, "inner"):
        passes = passes.inner
    return passes


@runtime_checkable
class SyncsGradients(Protocol):
    """A strategy whose ranks sum gradients once per update."""

    def set_requires_gradient_sync(self, is_required: bool) -> None:
        """False if more batches of the same update follow the next one (as in FSDP2)."""


@runtime_checkable
class ReportsProgress(Protocol):
    """Passes that know how far a step is."""

    def report_progress(self, tell: Callable[[float], None]) -> None:
        """Call ``tell`` with the part of a batch that is done, from 0 to 1, in later steps."""


class Correction(Protocol):
    """A choice of strategy that the first steps correct once."""

    is_over: bool

    def note(self, step_s: float) -> Strategy | None:
        """Note a step that has ended on the device; returns the next strategy if it changes."""


# The input of every strategy, and the result of preparing one.


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """Options of the training loop."""

    accumulate: int = 1
    """Batches per update; each counts this share of the loss."""
    clip_norm: float | None = None
    """Largest norm of all gradients together."""
    seed: int | None = None
    """Of random draws, each with its own; None continues PyTorch's generator."""
    outputs: bool = False
    """True if all that the model returns is kept, not only single numbers."""
    max_shapes: int = 8
    """Shapes of batches of each kind that are traced."""
    pad: Padding | None = None
    """Makes each batch one of few shapes."""
    replay: bool = True
    """True if a step on one CUDA device is replayed as a CUDA graph."""
    async_update: bool = False
    """Within a memory budget, updates on the host run into the next step: faster, but a parameter
    that is read between steps may not have its update yet; ``state_dict()`` waits for it."""


class Prepared(NamedTuple):
    """A strategy, the plan that it executes, and the predicted step time."""

    strategy: Strategy
    plan: Plan
    step_s: float | None
    """Predicted on the plan's devices, also where others emulate them; None where nobody knows."""
    searched: SavedPlan | None = None
    """The placement that was found for several devices of this process, where none was given."""
    correction: Correction | None = None
    """Replaces the memory plan by another one if the first steps show that it is faster."""


@dataclass(frozen=True, kw_only=True)
class TrainingTask:
    """Model, optimizer, batch and options of a training, whatever the strategy."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    """A whole batch of all ranks."""
    recipe: TraceOptions
    options: LoopOptions
    device: torch.device
    """Of this process."""
    is_ranked: bool = False
    """True where several ranks were started."""
    count: Count | None = None
    weights: str | Path | None = None
    reduce_dtype: torch.dtype | None = None


# Predicted step time of a plan on the device that runs it.


def predicted_s(problem: Problem, plan: Plan, device: torch.device) -> float | None:
    """Return the predicted step time; None if the plan's devices are only emulated."""
    return None if are_played(problem, plan, device) else claimed_step_s(problem, plan)


def claimed_step_s(problem: Problem, plan: Plan) -> float:
    """Return the plan's steady-state step time, else its single-step time, else a simulated one."""
    claims = plan.claims
    for known_s in (claims.repeated_step_s, claims.step_s):
        if known_s is not None:
            return known_s
    return simulate(problem, plan).makespan_s


def are_played(problem: Problem, plan: Plan, device: torch.device) -> bool:
    """True if the plan's device types are emulated: CPUs in place of GPUs, or the reverse."""
    kinds = {each.name: each.kind for each in problem.cluster.devices}
    is_cpu = device.type == "cpu"
    return any(kinds[name].is_cpu != is_cpu for name in used_devices(problem, plan))
