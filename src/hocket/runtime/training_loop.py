"""The training loop around a strategy: steps, checkpoints, progress, and drift of step times.

`TrainingLoop` is the object that `hocket.prepare` returns. Its strategy runs forward and backward.
The update is a step of the user's own optimizer, so every optimizer class, parameter group,
schedule and setting works; after a step ``model.parameters()`` have the new values. The loop also
saves and loads checkpoints. `Watch` compares step times with the prediction, and explains a lasting
difference once.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import nn

from hocket.base.checkpoint_folder import write_checkpoint
from hocket.base.config import rank_variables
from hocket.base.errors import UsageError, system_reason
from hocket.base.units import format_percent, format_seconds
from hocket.base.warn import warn_user
from hocket.capture.fake import batch_tensors
from hocket.runtime.checkpoint import (
    State,
    newest_checkpoint,
    read_state,
    refitted_optimizer,
    require_same_model,
    write_manifest,
    write_part,
    write_state,
)
from hocket.runtime.offload.patched_forward import require_unclaimed
from hocket.runtime.process_settings import deferred_gc
from hocket.runtime.ranks import broadcast_text, rank_device, require_same_batch
from hocket.runtime.replay import REPLAYED
from hocket.runtime.strategy import (
    Correction,
    LoopOptions,
    Strategy,
    Timings,
    innermost,
)
from hocket.simulate.timeline import Timeline

_MAX_COMPARED = 2
"""Number of batches that are compared between ranks."""


class DriftWarning(UserWarning):
    """Measured step times differ from the predicted time."""


class TrainingLoop:
    """Steps, evaluation and prediction of a model in training."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        options: LoopOptions,
    ) -> None:
        self.model, self.optimizer, self.options = model, optimizer, options
        self.num_steps = 0
        """Number of batches trained so far."""
        self.num_updates = 0
        self.outputs: Any = None
        """Outputs of the model in the last step or evaluation that the strategy has returned."""
        self.watch = Watch(strategy.predicted_s)
        self.timings: Timings | None = None
        """Timelines of the last timed step."""
        self._wants_cause = False
        self._strategy = strategy
        self.correction: Correction | None = None
        """Replaces the strategy if the first steps show that another one is faster."""
        self._num_compared = 0
        """Number of batches that were compared between ranks."""
        self._is_updated = False
        """True if an update has used the current gradients."""
        self._turn = threading.RLock()
        """Lock of the thread that steps or evaluates, because both use the same model."""

    def __repr__(self) -> str:
        name, line = type(self.model).__name__, self.progress()
        return f"{type(self).__name__}({name!r}, {line})"

    @property
    def lost(self) -> str:
        """Parts of the plan that cannot be applied to this model; empty if there are none."""
        return self._strategy.lost

    @property
    def replays(self) -> str:
        """Description of how the next step is launched: as a CUDA graph, or why not.

        Empty if that is unknown: modules are placed on several devices, or ranks share the model.
        """
        return self._strategy.replays

    def step(
        self,
        batch: Any,
        *,
        accumulate: bool | None = None,
        weight: float | None = None,
        timed: bool = False,
    ) -> torch.Tensor:
        """Train on a batch and return its loss.

        With ``accumulate=True`` gradients are accumulated and the optimizer is not stepped; by
        default it is stepped every `LoopOptions.accumulate` batches. ``weight`` multiplies the
        gradients of this batch; its default is 1 / `LoopOptions.accumulate`. With ``timed`` every
        op is timed, for a report.
        """
        with self._turn, self._correcting():
            require_unclaimed(self.model, innermost(self._strategy))
            # Not held during a step, which may fill its memory budget.
            self.outputs = None
            if self._wants_cause:
                self.watch.enter()
            if accumulate is None:
                accumulate = (self.num_steps + 1) % self.options.accumulate != 0
            if self._is_updated:
                self._drop_gradients()
            share = 1.0 / self.options.accumulate if weight is None else weight
            self._compare(batch)
            batch = self._padded(batch)
            is_alone = not accumulate and self.options.clip_norm is None
            self._strategy.expect(self.optimizer if is_alone else None)
            self._strategy.set_requires_gradient_sync(not accumulate)
            # Timed steps run eagerly and need memory in addition to that of a CUDA graph.
            if timed or (self._wants_cause and not self.replays.startswith(REPLAYED)):
                found, self.timings = self._strategy.timed(batch, self.num_steps + 1, share)
            else:
                with deferred_gc():
                    found = self._strategy.train(batch, self.num_steps + 1, share)
            loss, self.outputs = found
            self.num_steps += 1
            if not accumulate:
                self._update()
            self._watch_over(loss, batch)
            return loss

    def _compare(self, batch: Any) -> None:
        """Refuse batches that differ between ranks, in the first steps of this process."""
        # Loaders that shuffle differently do so from the first batch, so later steps need not pay.
        if self._num_compared < _MAX_COMPARED:
            self._num_compared += 1
            require_same_batch(batch)

    @contextmanager
    def _correcting(self) -> Iterator[None]:
        """Time the first steps, which may change the strategy of later steps."""
        if self.correction is None:
            yield
            return
        started_s = _now_s()
        yield
        strategy = self.correction.note(_now_s() - started_s)
        if strategy is not None:
            self._strategy, self.watch = strategy, Watch(strategy.predicted_s)
        if self.correction.is_over:
            self.correction = None

    def __call__(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch, for your own ``loss.backward()`` and ``optimizer.step()``."""
        require_unclaimed(self.model, innermost(self._strategy))
        self._is_updated, self.outputs = False, None
        self._strategy.expect(None)
        self._strategy.set_requires_gradient_sync(True)
        self._compare(batch)
        loss, self.outputs = self._strategy.forward(self._padded(batch), self.num_steps + 1)
        self.num_steps += 1
        return loss

    def evaluate(self, batch: Any) -> torch.Tensor:
        """Return the loss of a batch in evaluation mode, without gradients or updates."""
        with self._turn:
            require_unclaimed(self.model, innermost(self._strategy))
            loss, self.outputs = self._strategy.evaluate(self._padded(batch))
            return loss

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs in evaluation mode."""
        with self._turn:
            require_unclaimed(self.model, innermost(self._strategy))
            return self._strategy.predict(self._padded(batch))

    # ── checkpoints ──────────────────────────────────────────────────────────────────────────

    def state_dict(self) -> State:
        """Return the full state of the training, to continue under this plan or another.

        ``model`` and ``optimizer`` are like ``model.state_dict()`` and ``optimizer.state_dict()``.
        """
        with self._turn:
            strategy, pending = self._strategy, not self._is_updated
            strategy.settle(self.optimizer)
            if strategy.rank_state is not None:
                gathered = strategy.rank_state.gathered(self.optimizer, pending=pending)
                return self._with_progress(gathered)
            named = self.model.named_parameters() if pending else ()
            # In one process tensors are those of the model: no copy is made.
            return self._with_progress({
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "gradients": {name: p.grad for name, p in named if p.grad is not None},
            })  # fmt: skip

    def _with_progress(self, state: State) -> State:
        """Add counters, and state of random generators."""
        return {
            **state,
            "generators": _generator_states(),
            "loop": {"num_steps": self.num_steps, "num_updates": self.num_updates},
        }

    def load_state_dict(self, state: State) -> None:
        """Load a state that `state_dict` returned."""
        strategy = self._strategy
        if strategy.rank_state is None:
            require_same_model(state["model"], self.model.state_dict())
        optimizer = refitted_optimizer(state["optimizer"], self.optimizer)
        strategy.settle(self.optimizer)
        self._drop_gradients()
        if strategy.rank_state is not None:
            strategy.rank_state.take({**state, "optimizer": optimizer}, self.optimizer)
        else:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(optimizer)
            for name, parameter in self.model.named_parameters():
                if name in state["gradients"]:
                    parameter.grad = state["gradients"][name].to(parameter.device, copy=True)
        self.num_steps = int(state["loop"]["num_steps"])
        self.num_updates = int(state["loop"]["num_updates"])
        _set_generator_states(state["generators"])

    def save(
        self,
        folder: str | Path,
        extra: Mapping[str, Any] | None = None,
        *,
        sharded: bool = False,
    ) -> Path:
        """Write a checkpoint below ``folder`` atomically and return its path.

        ``extra`` holds additional values to save, such as the ``state_dict()`` of a scheduler or
        the epoch. All ranks must call `save`; rank 0 writes. With ``sharded`` each rank writes the
        part that it holds, into a folder on a file system that all ranks share.
        """
        try:
            return self._save(folder, extra or {}, sharded=sharded)
        except (OSError, SafetensorError) as error:
            reason = system_reason(error)
            raise UsageError(
                f"cannot write a checkpoint: {reason}",
                hint="name a folder that you may write to, with space for the model and its state",
                where=str(folder),
            ) from error

    def _save(self, folder: str | Path, extra: Mapping[str, Any], *, sharded: bool) -> Path:
        strategy, device = self._strategy, rank_device(rank_variables())
        if sharded and strategy.rank_state is not None:
            strategy.settle(self.optimizer)
            own = strategy.rank_state.parts(self.optimizer, pending=not self._is_updated)
            return save_parts(folder, self.num_steps, self._with_progress(own), extra, device)
        state = {**self.state_dict(), "extra": dict(extra)}
        path = Path(folder)
        if is_first_rank():
            path = write_checkpoint(folder, self.num_steps, lambda at: write_state(at, state))
        if not torch.distributed.is_initialized():
            return path
        # Only rank 0 knows the folder's name, which has a number if the step was saved before.
        return Path(broadcast_text(str(path), 0, device))

    def load(self, checkpoint: str | Path) -> dict[str, Any]:
        """Load a checkpoint, which any plan may have written, and return its ``extra``.

        ``checkpoint`` is the path that `save` returned, or the folder that was passed to `save`, of
        which the newest checkpoint is loaded.
        """
        state = read_state(newest_checkpoint(checkpoint))
        extra: dict[str, Any] = state.pop("extra", {})
        self.load_state_dict(state)
        return extra

    def _padded(self, batch: Any) -> Any:
        return batch if self.options.pad is None else self.options.pad(batch)

    def progress(self) -> str:
        """Return one line: loss, samples per second, measured and predicted step time."""
        return self.watch.line(self.num_steps)

    def _watch_over(self, loss: torch.Tensor, batch: Any) -> None:
        if self._wants_cause and self.watch.predicted_s is not None:
            message = f"{self.progress()}; {self._cause()}"
            warn_user(message, DriftWarning)
        self._wants_cause = self.watch.note(loss, batch)
        if self._wants_cause:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # else running kernels count as time of the loop
            self.watch.leave()

    def _cause(self) -> str:
        """Return the reason why step times differ from the prediction, from the last timed step."""
        if cause := self.watch.loop_cause():
            return cause
        if self._strategy.rank_state is not None:
            return self.watch.rank_cause(self._strategy.computed_s) or UNTIMED
        if self.replays.startswith(REPLAYED):
            return f"steps are {self.replays}; train.step(batch, timed=True) times every op"
        if self.timings is None:
            return UNTIMED
        _, _, predicted, measured = self.timings
        return likely_cause(predicted, measured, self.timings.problem.cluster.device_names)

    def _update(self) -> None:
        # Gradients can be read until the next step, which drops them even if this update fails.
        self._is_updated = True
        if self.options.clip_norm is not None:
            self._strategy.clip(self.options.clip_norm)
        self._strategy.update(self.optimizer)
        self.num_updates += 1

    def _drop_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
        self._is_updated = False


def is_first_rank() -> bool:
    """True in rank 0, and if there is only one process."""
    return rank_variables().get("RANK", "0") == "0"


def save_parts(
    folder: str | Path,
    step: int,
    parts: dict[str, Any],
    extra: Mapping[str, Any],
    device: torch.device,
) -> Path:
    """Write a checkpoint to which each rank contributes its part; all ranks must call it."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def write(place: Path) -> None:
        plain = write_part(place, parts, rank)
        listed = [broadcast_text(plain, each, device) for each in range(num_ranks)]
        if not rank:
            write_manifest(place, listed, extra)

    if rank:
        # The folder to write to, and at the end the path of the complete checkpoint.
        write(Path(broadcast_text("", 0, device)))
        return Path(broadcast_text("", 0, device))
    path = write_checkpoint(
        folder, step, lambda place: write(Path(broadcast_text(str(place), 0, device)))
    )
    return Path(broadcast_text(str(path), 0, device))


def _now_s() -> float:
    """Return the time after all queued GPU work has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _generator_states() -> dict[str, torch.Tensor]:
    """Return the states of the random number generators, by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{at}": s for at, s in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _set_generator_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    for device, state in states.items():
        if device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_rng_state(state, device)


DRIFT = 0.2
"""Minimum relative difference from the prediction at which a step counts as drifting."""
NUM_DRIFTING = 10
"""Number of consecutive drifting steps before a warning is issued, once."""
_REFINE = "train.refine() plans again with the times of this step"
UNTIMED = (
    "plan again with measured times: hocket profile MODEL -o times.json, then hocket plan (or fit) "
    "with --profile times.json"
)
"""Message for strategies that measure only entire steps, not single ops."""
_NUM_SHOWN = 20
"""Number of latest steps whose median time is shown."""


class Watch:
    """Step times and losses of a training loop, compared with the prediction.

    The time of a step is measured from the end of the previous step to the end of this step.
    Asynchronous work of a GPU thus counts in the step that waits for it.
    """

    def __init__(self, predicted_s: float | None) -> None:
        """``predicted_s`` is None if the devices in use are not those of the plan."""
        self.predicted_s = predicted_s
        self.step_s: deque[float] = deque(maxlen=_NUM_SHOWN)
        self.loss: torch.Tensor | None = None
        self.num_samples = 0
        self._ended_s = math.nan
        self._num_drifting = 0
        self._left_s = self._between_s = math.nan

    def leave(self) -> None:
        """Record the end of a step; the time until `enter` is spent in the user's loop."""
        self._left_s = time.perf_counter()

    def enter(self) -> None:
        """Record the beginning of a step."""
        self._between_s = time.perf_counter() - self._left_s

    def note(self, loss: torch.Tensor, batch: Any) -> bool:
        """Record a finished step; return True if the next step should determine a drift's cause."""
        now_s = time.perf_counter()
        took_s, self._ended_s, self.loss = now_s - self._ended_s, now_s, loss
        first = next((tensor for _, tensor in batch_tensors(batch)), None)
        self.num_samples = 1 if first is None or not first.dim() else int(first.shape[0])
        if math.isnan(took_s):
            return False
        self.step_s.append(took_s)
        if self.predicted_s is None:
            return False
        is_off = abs(took_s - self.predicted_s) > DRIFT * self.predicted_s
        self._num_drifting = self._num_drifting + 1 if is_off else 0
        # Equality, so that a lasting drift is explained once.
        return self._num_drifting == NUM_DRIFTING

    @property
    def median_step_s(self) -> float | None:
        """Median time of the latest steps; None before the second step."""
        return statistics.median(self.step_s) if self.step_s else None

    def loop_cause(self) -> str:
        """Return a message if the user's loop makes steps slow, else an empty string."""
        predicted_s, step_s = self.predicted_s, self.median_step_s
        if predicted_s is None or step_s is None or not self._between_s > DRIFT * predicted_s:
            return ""
        if step_s < predicted_s:
            return ""
        return (
            f"{format_seconds(self._between_s)} of it pass between steps, in the loop itself: have "
            "batches read by workers of a DataLoader, and log seldom"
        )

    def rank_cause(self, computed_s: float | None) -> str:
        """Return a message with the time that one rank computes, and the time that it waits."""
        step_s = self.median_step_s
        if computed_s is None or step_s is None:
            return ""
        waits = format_percent(max(0.0, 1 - computed_s / step_s))
        return (
            f"this rank computes {format_seconds(computed_s)} of it; {waits} of the step are the "
            "update and waiting for other ranks and links; hocket launch --profile times.json "
            "plans again with measured times"
        )

    def line(self, num_steps: int) -> str:
        """Return one line of progress for display."""
        if self.loss is None:
            return "no step yet"
        parts = [f"step {num_steps}: loss {float(self.loss):.4g}"]
        step_s = self.median_step_s
        if step_s is not None:
            parts.append(f"{self.num_samples / step_s:.4g} samples/s")
            timing = format_seconds(step_s)
            if self.predicted_s is not None:
                timing += f" of {format_seconds(self.predicted_s)} predicted"
            parts.append(timing)
        return ", ".join(parts)


def likely_cause(predicted: Timeline, measured: Timeline, device_names: Sequence[str]) -> str:
    """Describe why a step differs from its prediction (device, links or host), with advice."""
    computes = measured.busy_s / np.maximum(predicted.busy_s, 1e-12)
    computes[predicted.busy_s <= 0] = 1.0
    # Logarithms, so that half and twice the predicted time are equally far off.
    worst = int(np.argmax(np.abs(np.log(np.maximum(computes, 1e-12)))))
    sent_s, planned_s = (
        float((t.transfer_end_s - t.transfer_start_s).sum()) for t in (measured, predicted)
    )
    travels = sent_s / planned_s if planned_s > 0 else 1.0
    if abs(math.log(max(computes[worst], 1e-12))) >= abs(math.log(max(travels, 1e-12))):
        if abs(computes[worst] - 1) > DRIFT:
            return (
                f"{device_names[worst]} computes {computes[worst]:.2g} times as long as predicted: "
                f"{_REFINE}, unless another program is on it"
            )
    elif abs(travels - 1) > DRIFT:
        return (
            f"transfers take {travels:.2g} times as long as predicted: "
            "hocket probe -o links.toml measures the links, plan on that file"
        )
    idle = 1 - float(measured.busy_s.max()) / max(measured.makespan_s, 1e-12)
    return (
        f"devices compute as predicted and wait {format_percent(idle)} of the step for the host: "
        "larger batches, or prepare(compiled=True), give them more to do at once"
    )
