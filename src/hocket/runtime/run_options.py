"""Options, callbacks and result of ``hocket run``, and the choice of a typical step to show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from hocket.base.errors import UsageError
from hocket.processes.worker_group import Timeouts
from hocket.simulate.timeline import Timeline

if TYPE_CHECKING:
    from hocket.runtime.numerics_check import Agreement
    from hocket.runtime.step_record import StepRecord

SILENCE_S = Timeouts().silence_s
"""A rank without heartbeat and without CPU use for this long counts as stopped."""

BACKENDS = ("auto", "single", "gloo", "nccl")
"""``single`` is one process; ``gloo`` (CPUs) and ``nccl`` (GPUs) use one process per device."""

OnStart = Callable[[list[int]], None]
OnStep = Callable[[int, "StepRecord"], None]
OnProgress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run."""

    steps: int = 1
    backend: str = "auto"
    """One of `BACKENDS`; ``auto`` chooses by plan and machine."""
    seed: int = 0
    threads: int | None = None
    """Threads of each process on CPUs; None divides the cores among the processes."""
    silence_s: float = SILENCE_S
    model: str | None = None
    """Name or factory of the planned model, if the name in the plan cannot be resolved."""
    checks: bool = True
    """For a plan of a transformer's shape: compare a small copy with one device first."""
    dtype: str | None = None
    """For a plan of a transformer's shape: dtype of weights and activations. None means float32 on
    CPUs; on GPUs the planned dtype, or bfloat16 if the planned dtype needs loss scaling."""

    def require_meaning(self, kind: str) -> None:
        """Refuse options that do not apply to plans of this kind."""
        for each in fields(self):
            kinds = _ONLY_FOR.get(each.name, (kind,))
            if kind not in kinds and getattr(self, each.name) != each.default:
                raise UsageError(
                    f"{each.name} has no meaning for {KIND_NAMES.get(kind, kind)}",
                    hint=f"leave it out: it applies to {KIND_NAMES[kinds[0]]}",
                )


KIND_NAMES = {
    "placement": "a placement", "transformer": "a transformer plan", "shares": "a batch split",
    "budget": "a memory plan", "waves": "waves",
}  # fmt: skip
_ONLY_FOR = {
    "model": ("placement", "shares", "budget", "waves"),
    "checks": ("transformer",), "dtype": ("transformer",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunCallbacks:
    """Callbacks of a run."""

    on_start: OnStart = lambda process_ids: None
    """Called with the process ids of the ranks, if ranks are started."""
    on_step: OnStep = lambda number, record: None
    """Called after each step."""
    on_progress: OnProgress = lambda what: None
    """Called with the current activity whenever it changes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RunResult:
    """Measured steps of a plan, with the prediction."""

    backend: str
    runs_on: Mapping[str, str]
    """The real device of each device of the plan."""
    losses: tuple[float | None, ...]
    """Loss of each step; None in inference."""
    step_s: tuple[float, ...]
    predicted_step_s: float
    predicted: Timeline
    """Per device; for a plan of a transformer's shape, per pipeline rank."""
    measured: Timeline | None
    """Timeline of a typical step; None if ops were not timed."""
    peak_bytes: Mapping[str, int]
    """Measured peak per device; empty if it was not measured."""
    dtype: str | None = None
    """Dtype of weights and activations, for a plan of a transformer's shape."""
    agreement: Agreement | None = None
    """Differences between a small copy and one device, if they were checked."""

    @property
    def median_step_s(self) -> float:
        """Median time of all steps without the first one, which warms up."""
        return _median(self.step_s)

    @property
    def is_finite(self) -> bool:
        """True if every loss is a number."""
        return all(loss is None or math.isfinite(loss) for loss in self.losses)


def middle_step(records: Sequence[StepRecord], step_s: Sequence[float]) -> StepRecord:
    """Return a typical step: the longest one of ``records`` up to the median time of all steps.

    ``records`` belong to the latest steps. The first step of a run is excluded as warm-up.
    """
    shown = records[1:] if 1 < len(records) == len(step_s) else records
    median_s = _median(step_s)
    within = [record for record in shown if record.step_s <= median_s]
    if within:
        return max(within, key=lambda record: record.step_s)
    return min(shown, key=lambda record: record.step_s)


def _median(step_s: Sequence[float]) -> float:
    return statistics.median(step_s[1:] or step_s)
