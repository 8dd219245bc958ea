"""Progress of a training loop: loss, samples/s, step time against the prediction, and drift.

A step is the time from the end of one to the end of the next, so that what a GPU does later counts
where it happens. Drift is reported once: when ten steps in a row were over a fifth away from the
prediction, with the cause that a timed step shows and what to do about it.
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
    "no op of such a step is timed by itself: unless another program is on the device or the host, "
    "plan with measured times: hocket profile MODEL -o times.json, then hocket fit (for memory=) "
    "or hocket plan with --profile times.json, and prepare(plan=) takes the file that it writes"
)
"""Where nothing but the whole step is known."""
_NUM_SHOWN = 20
"""Last steps of which the one in the middle is shown."""


class Watch:
    """Times and losses of the steps of a loop."""

    def __init__(self, predicted_s: float | None) -> None:
        """``predicted_s`` is None where the plan's devices are not those that run it."""
        self.predicted_s = predicted_s
        self.step_s: deque[float] = deque(maxlen=_NUM_SHOWN)
        self.loss: torch.Tensor | None = None
        self.num_samples = 0
        self._ended_s = math.nan
        self._num_drifting = 0
        self._left_s = self._between_s = math.nan

    def leave(self) -> None:
        """A step has ended on all devices: until `enter` time is the caller's own."""
        self._left_s = time.perf_counter()

    def enter(self) -> None:
        """A step begins."""
        self._between_s = time.perf_counter() - self._left_s

    def note(self, loss: torch.Tensor, batch: Any) -> bool:
        """Note a step that has ended; True when it is time to look for the cause of a drift."""
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
        """Middle time of the last steps; None before the second."""
        return statistics.median(self.step_s) if self.step_s else None

    def loop_cause(self) -> str:
        """Message if the user's loop spends notable time between slow steps; empty otherwise."""
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
        """Message on a drift as one rank sees it: how much of the step it computes, and waits."""
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
        """One line for people."""
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
    """Why a step does not take what was predicted (device, links or host), and what to do."""
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
