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
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from hocket.base.errors import UsageError
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.train.loss_weight import Weight
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
