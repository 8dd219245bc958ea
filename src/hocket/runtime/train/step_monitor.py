"""Progress of a training loop: loss, samples/s, step time against the prediction, and drift.

A step is timed from the end of the last one to its own end, so that asynchronous GPU work is
counted where it is waited for. Drift is reported once: when ten steps in a row differ from the
prediction by more than a fifth, with the likely cause according to a timed step, and advice.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hocket.base.units import format_percent, format_seconds
from hocket.capture.fake import batch_tensors
from hocket.simulate.timeline import Timeline

DRIFT = 0.2
NUM_DRIFTING = 10
_REFINE = "train.refine() plans again with the times of this step"
UNTIMED = (
    "plan again with measured times: hocket profile MODEL -o times.json, then hocket plan (or fit) "
    "with --profile times.json"
)
"""Advice if only the time of entire steps is known."""
_NUM_SHOWN = 20
"""Number of latest steps whose median time is shown."""


class Watch:
    """Step times and losses of a training loop."""

    def __init__(self, predicted_s: float | None) -> None:
        """``predicted_s`` is None if the plan's devices are not the ones that run it."""
        self.predicted_s = predicted_s
        self.step_s: deque[float] = deque(maxlen=_NUM_SHOWN)
        self.loss: torch.Tensor | None = None
        self.num_samples = 0
        self._ended_s = math.nan
        self._num_drifting = 0
        self._left_s = self._between_s = math.nan

    def leave(self) -> None:
        """Note the end of a step on all devices; until `enter`, time belongs to the user's loop."""
        self._left_s = time.perf_counter()

    def enter(self) -> None:
        """Note the beginning of a step."""
        self._between_s = time.perf_counter() - self._left_s

    def note(self, loss: torch.Tensor, batch: Any) -> bool:
        """Note a finished step; return True if the cause of a drift should be determined now."""
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
        return self._num_drifting == NUM_DRIFTING

    @property
    def median_step_s(self) -> float | None:
        """Median time of the latest steps; None before the second step."""
        return statistics.median(self.step_s) if self.step_s else None

    def loop_cause(self) -> str:
        """Return a message if the user's loop takes notable time between slow steps, else
        nothing."""
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
        """Return a message on a drift from the view of one rank: time it computes, and time it
        waits."""
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
