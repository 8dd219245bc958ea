"""Result of running a plan."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.simulate.timeline import Timeline

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.runtime.numerics_check import Agreement
    from hocket.runtime.step_record import StepRecord


@dataclass(frozen=True, eq=False, kw_only=True)
class RunResult:
    """Measured steps, with the prediction."""

    backend: str
    runs_on: Mapping[str, str]
    """By device of the plan: the real device that ran it."""
    losses: tuple[float | None, ...]
    """Of every step; None in inference."""
    step_s: tuple[float, ...]
    predicted_step_s: float
    """Of a config, with what surrounds its pipeline."""
    predicted: Timeline
    """By device; of a config, by pipeline rank, of which all devices are alike."""
    measured: Timeline | None
    """The step that took the middle time; None where its parts were not timed (configs on
    GPUs)."""
    peak_bytes: Mapping[str, int]
    """By device, measured: on CPUs of a placement, on GPUs always."""
    executed: tuple[Problem, Plan] | None = None
    """Problem and plan of the part of the batch that ran, where that was not the whole plan."""
    dtype: str | None = None
    """Of a config: type of weights and activations."""
    agreement: Agreement | None = None
    """Of a config: how far it is from one device at toy size, where that was checked."""

    @property
    def median_step_s(self) -> float:
        """Middle time of all steps but the first, which warms up, where there are more."""
        return _median(self.step_s)

    @property
    def is_finite(self) -> bool:
        """True if every loss is a number."""
        return all(loss is None or math.isfinite(loss) for loss in self.losses)


def middle_step(records: Sequence[StepRecord], step_s: Sequence[float]) -> StepRecord:
    """The step that stands for the others: not the first, and the one nearest to the middle time of
    all that takes no longer. ``records`` are those of the last of the steps."""
    shown = records[1:] if 1 < len(records) == len(step_s) else records
    median_s = _median(step_s)
    within = [record for record in shown if record.step_s <= median_s]
    if within:
        return max(within, key=lambda record: record.step_s)
    return min(shown, key=lambda record: record.step_s)


def _median(step_s: Sequence[float]) -> float:
    return statistics.median(step_s[1:] or step_s)
