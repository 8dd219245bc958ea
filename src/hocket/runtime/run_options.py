"""Options, callbacks and result of running a plan for some steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from hocket.base.errors import UsageError
from hocket.processes.worker_group import Timeouts
from hocket.simulate.timeline import Timeline

if TYPE_CHECKING:
    from hocket.runtime.step_record import StepRecord
if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.runtime.numerics_check import Agreement
    from hocket.runtime.step_record import StepRecord

SILENCE_S = Timeouts().silence_s
"""A rank that gives no sign of life for this long, and does nothing, counts as stopped."""

BACKENDS = ("auto", "single", "gloo", "nccl")
"""One process, or a process per device that exchanges over gloo (CPUs) or NCCL (GPUs)."""

OnStart = Callable[[list[int]], None]
OnStep = Callable[[int, "StepRecord"], None]
OnProgress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of a run."""

    steps: int = 1
    backend: str = "auto"
    """One of `BACKENDS`: ``auto`` takes the one that suits plan and machine."""
    seed: int = 0
    threads: int | None = None
    """Threads of each process on CPUs; None shares the cores among them."""
    silence_s: float = SILENCE_S

    slowdown: Mapping[str, float] = field(default_factory=dict)
    """By device: how many times as long its ops take; a testing aid for placements on `gloo`."""
    model: str | None = None
    """Of a placement: the planned model, where its name does not lead to it any more."""
    scale: float = 1.0
    """Of a placement or shares: part of the planned batch that each step takes; who does what stays
    the same."""

    checks: bool = True
    """Of a config: whether it is first compared with one device at toy size."""
    dtype: str | None = None
    """Of a config: type of weights and activations; None: float32 on CPUs, on GPUs the
    planned one where training in it needs no scaling, else bfloat16."""

    def require_meaning(self, kind: str) -> None:
        """Refuse options that another kind of plan takes, and what is no part of a batch."""
        for field_ in fields(self):
            default = {} if field_.name == "slowdown" else field_.default
            kinds = _ONLY_FOR.get(field_.name, (kind,))
            if kind not in kinds and getattr(self, field_.name) != default:
                hint = f"leave it out: it is for a {kinds[0]}"
                raise UsageError(
                    f"{field_.name} has no meaning for {KIND_NAMES.get(kind, kind)}", hint=hint
                )
        if not 0 < self.scale <= 1:
            raise UsageError(
                f"--scale {self.scale:g} is no part of the batch", hint="give one above 0, up to 1"
            )


KIND_NAMES = {
    "placement": "a placement", "transformer": "a transformer plan", "shares": "a batch split",
    "budget": "a memory plan", "waves": "waves",
}  # fmt: skip
_ONLY_FOR = {
    "slowdown": ("placement",), "model": ("placement", "shares", "budget", "waves"),
    "scale": ("placement", "shares"),
    "checks": ("transformer",), "dtype": ("transformer",),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunCallbacks:
    """Callbacks of a run."""

    on_start: OnStart = lambda process_ids: None
    """Called with the process ids of the ranks, if there are any."""
    on_step: OnStep = lambda number, record: None
    """Called after each step."""
    on_progress: OnProgress = lambda what: None
    """Called now and then with the current activity."""


# Result of running a plan.


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
