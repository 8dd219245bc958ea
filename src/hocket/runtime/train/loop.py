"""The loop of a person, carried by a plan: real weights, their optimizer, their batches.

Forward and backward are carried where the plan says; the update is the person's own optimizer,
called as they would call it, so that every class, group, schedule and setting of it holds. Weights
stay theirs: after a step ``model.parameters()`` have the new values.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from hocket.runtime.train.batches import Padding
from hocket.runtime.train.carrier import (
    Carrier,
    HoldsParts,
    KeepsLanes,
    SyncsGradients,
    TellsReplay,
    Timings,
)
from hocket.runtime.train.checkpoint import State, refitted_optimizer, require_same_model
from hocket.runtime.train.cycles import unsearched
from hocket.runtime.train.forwards import require_free
from hocket.runtime.train.repeats import REPLAYED
from hocket.runtime.train.watch import UNTIMED, Watch, likely_cause


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """How a person wants to train."""

    accumulate: int = 1
    """Batches per update; each counts this share of the loss."""
    clip_norm: float | None = None
    """Largest norm of all gradients together."""
    seed: int | None = None
    """Of random draws, each with its own; None goes on where PyTorch's generator stands."""
    outputs: bool = False
    """Whether all that the model returns is kept, not only single numbers."""
    max_shapes: int = 8
    """Shapes of batches of each kind that are recorded."""
    pad: Padding | None = None
    """Makes each batch one of few shapes."""
    replay: bool = True
    """Whether a step on one CUDA device is launched as a whole, as a CUDA graph."""
    async_update: bool = False
    """Within a memory budget, updates on the host run into the next step: faster, but a parameter
    that is read between steps may not have its update yet; ``state_dict()`` waits for it."""


class Correction(Protocol):
    """A choice that the first steps correct once."""

    is_over: bool

    def note(self, step_s: float) -> Carrier | None:
        """Note a step that has ended on the device; what runs the next ones, where that changes."""


class DriftWarning(UserWarning):
    """Steps take other times than predicted."""


class TrainingLoop:
    """Steps, evaluation and prediction of a model in training."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        carrier: Carrier,
        options: LoopOptions,
    ) -> None:
        self.model, self.optimizer, self.options = model, optimizer, options
        self.num_steps = 0
        """Batches that were trained on."""
        self.num_updates = 0
        self.outputs: Any = None
        """What the model returned in the last step or evaluation, as far as it was kept."""
        self.watch = Watch(carrier.predicted_s)
        self.timings: Timings | None = None
        """Of the last step that was timed."""
        self._wants_cause = False
        self._carrier = carrier
        self.correction: Correction | None = None
        """What may have another plan go on after the first steps."""
        self._is_updated = False
        """Whether the gradients that are there were used."""
        self._turn = threading.RLock()
        """Of the thread that steps or evaluates: one at a time, or both would have the model."""

    def __repr__(self) -> str:
        name, told = type(self.model).__name__, self.watch.line(self.num_steps)
        return f"{type(self).__name__}({name!r}, {told})"

    @property
    def lost(self) -> str:
        """What the plan cannot do for this model; empty where it does everything."""
        return self._carrier.lost

    @property
    def replays(self) -> str:
        """Whether the next step is launched as a whole, as a CUDA graph, and why not.

        Empty where that is not told: modules were moved, or ranks share the model.
        """
        return self._carrier.replays if isinstance(self._carrier, TellsReplay) else ""

    def step(
        self,
        batch: Any,
        *,
        accumulate: bool | None = None,
        weight: float | None = None,
        timed: bool = False,
    ) -> torch.Tensor:
        """Train on a batch and return its loss.

        ``accumulate=True`` adds the gradients and leaves the update to a later step; without it the
        loop updates every `LoopOptions.accumulate` steps. ``weight`` is what the loss counts, by
        default its share of an update. With ``timed`` every op is timed, for a report.
        """
        with self._turn, self._correcting():
            require_free(self.model, self._carrier)
            # What was returned before is not held beside a step, which may fill its budget.
            self.outputs = None
            if self._wants_cause:
                self.watch.enter()
            if accumulate is None:
                accumulate = (self.num_steps + 1) % self.options.accumulate != 0
            if self._is_updated:
                self._drop_gradients()
            share = 1.0 / self.options.accumulate if weight is None else weight
            batch = self._padded(batch)
            is_alone = not accumulate and self.options.clip_norm is None
            self._carrier.expect(self.optimizer if is_alone else None)
            if isinstance(self._carrier, SyncsGradients):
                self._carrier.set_requires_gradient_sync(not accumulate)
            # Ops that are timed one by one need memory of their own beside that of a graph.
            if timed or (self._wants_cause and not self.replays.startswith(REPLAYED)):
                carried, self.timings = self._carrier.timed(batch, self.num_steps + 1, share)
            else:
                with unsearched():
                    carried = self._carrier.train(batch, self.num_steps + 1, share)
            loss, self.outputs = carried
            self.num_steps += 1
            if not accumulate:
                self._update()
            self._watch_over(loss, batch)
            return loss

    @contextmanager
    def _correcting(self) -> Iterator[None]:
        """Around a step: the first ones are timed, and may change what runs the others."""
        if self.correction is None:
            yield
            return
        started_s = _now_s()
        yield
        carrier = self.correction.note(_now_s() - started_s)
        if carrier is not None:
            self._carrier, self.watch = carrier, Watch(carrier.predicted_s)
        if self.correction.is_over:
            self.correction = None

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss of a batch, for your own ``loss.backward()`` and ``optimizer.step()``."""
        require_free(self.model, self._carrier)
        self._is_updated, self.outputs = False, None
        self._carrier.expect(None)
        if isinstance(self._carrier, SyncsGradients):
            self._carrier.set_requires_gradient_sync(True)
        loss, self.outputs = self._carrier.forward(self._padded(batch), self.num_steps + 1)
        self.num_steps += 1
        return loss

    def evaluate(self, batch: Any) -> torch.Tensor:
        """The loss of a batch in evaluation mode; nothing is trained."""
        with self._turn:
            require_free(self.model, self._carrier)
            loss, self.outputs = self._carrier.evaluate(self._padded(batch))
            return loss

    def predict(self, batch: Any) -> Any:
        """What the model returns in evaluation mode."""
        with self._turn:
            require_free(self.model, self._carrier)
            return self._carrier.predict(self._padded(batch))

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> State:
        """All that the training needs to go on, under this plan or another.

        ``model`` and ``optimizer`` are the state dicts that they give themselves.
        """
        with self._turn:
            return {**self._whole_state(pending=not self._is_updated), **self._progress_state()}

    def parts(self) -> State | None:
        """What this rank keeps of the state that ranks write together; None where it has all."""
        if not isinstance(self._carrier, HoldsParts):
            return None
        pending = not self._is_updated
        found = self._carrier.parts(self.optimizer, pending=pending)
        found["optimizer"]["param_groups"] = self.optimizer.state_dict()["param_groups"]
        return {**found, **self._progress_state()}

    def _progress_state(self) -> dict[str, Any]:
        return {
            "generators": _generator_states(),
            "loop": {"num_steps": self.num_steps, "num_updates": self.num_updates},
        }

    def _whole_state(self, *, pending: bool) -> dict[str, Any]:
        if isinstance(self._carrier, HoldsParts):
            return self._carrier.gathered(self.optimizer, pending=pending)
        self._carrier.gather(self.optimizer)
        lanes = self._carrier.lanes_state() if isinstance(self._carrier, KeepsLanes) else {}
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "gradients": self._gradients() if pending else {},
            **({"lanes": lanes} if lanes else {}),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from what `state_dict` gave."""
        if not isinstance(self._carrier, HoldsParts):
            require_same_model(state["model"], self.model.state_dict())
        optimizer = refitted_optimizer(state["optimizer"], self.optimizer)
        self._drop_gradients()
        if isinstance(self._carrier, HoldsParts):
            self._carrier.take({**state, "optimizer": optimizer}, self.optimizer)
        else:
            self._carrier.gather(self.optimizer)
            self._take(state, optimizer)
        self.num_steps = int(state["loop"]["num_steps"])
        self.num_updates = int(state["loop"]["num_updates"])
        _set_generator_states(state["generators"])

    def _take(self, state: State, optimizer: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(optimizer)
        for name, parameter in self.model.named_parameters():
            if name in state["gradients"]:
                parameter.grad = state["gradients"][name].to(parameter.device, copy=True)
        if isinstance(self._carrier, KeepsLanes):
            self._carrier.take_lanes(state.get("lanes", {}))

    def _gradients(self) -> dict[str, torch.Tensor]:
        named = self.model.named_parameters()
        return {name: p.grad for name, p in named if p.grad is not None}

    def _padded(self, batch: Any) -> Any:
        return batch if self.options.pad is None else self.options.pad(batch)

    def progress(self) -> str:
        """One line: loss, samples per second, the step as it is and as it was predicted."""
        return self.watch.line(self.num_steps)

    def _watch_over(self, loss: torch.Tensor, batch: Any) -> None:
        if self._wants_cause and self.watch.predicted_s is not None:
            told = f"{self.progress()}; {self._cause()}"
            warnings.warn(told, DriftWarning, 4)  # the line of the caller's own loop
        self._wants_cause = self.watch.note(loss, batch)
        if self._wants_cause:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # else what devices still do counts as the loop's time
            self.watch.leave()

    def _cause(self) -> str:
        """Why steps take other times than predicted, as far as the last timed one shows it."""
        if told := self.watch.loop_cause():
            return told
        if isinstance(self._carrier, HoldsParts):
            return self.watch.rank_cause(self._carrier.computed_s) or UNTIMED
        if self.replays.startswith(REPLAYED):
            return f"steps are {self.replays}; train.step(batch, timed=True) times every op"
        if self.timings is None:
            return UNTIMED
        _, _, predicted, measured = self.timings
        return likely_cause(predicted, measured, self.timings.problem.cluster.device_names)

    def _update(self) -> None:
        # Gradients can be looked at until the next step begins, which adds to none of them, also
        # where their update fails.
        self._is_updated = True
        if self.options.clip_norm is not None:
            self._carrier.clip(self.options.clip_norm)
        self._carrier.update(self.optimizer)
        self.num_updates += 1

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        self._is_updated = False


def _now_s() -> float:
    """The time when devices have done all that they were given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _generator_states() -> dict[str, torch.Tensor]:
    """Where the generators of random numbers stand, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{at}": s for at, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for device, state in states.items():
        if device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state, device)
