"""Compare a division with one device at toy size: the loss and every gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hocket.base.errors import CheckError
from hocket.plan.divided import DividedTraining
from hocket.runtime.parallel.job import TrainingJob
from hocket.runtime.parallel.jobs import make_job
from hocket.runtime.parallel.reference import DividedReference, reference_run
from hocket.runtime.parallel.refusals import refuse_plan, str_of
from hocket.runtime.parallel.spawn import JobResult, run_jobs
from hocket.runtime.parallel.toy import toy_of

TOLERANCE = 1e-6
"""Largest difference, relative to the largest value of the tensor and never below one."""
_STEPS = 2
"""The second step's loss also tells whether the optimizer did its part."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """How far a division is from one device."""

    loss_error: float
    gradient_error: float
    worst: str
    """The parameter whose gradient is the furthest off."""

    @property
    def is_right(self) -> bool:
        """Whether all differences are within the tolerance; what is not a number is not."""
        return self.loss_error <= TOLERANCE and self.gradient_error <= TOLERANCE


def check_division(plan: DividedTraining) -> Agreement:
    """Run a plan's division at toy size against one device; raises where they differ."""
    refuse_plan(plan)
    model, division, schedule = toy_of(plan.model, plan.division, plan.schedule)
    found = check_jobs([make_job(model, division, schedule)])[0]
    if not found.is_right:
        raise CheckError(
            f"PyTorch trains {str_of(plan.division)} wrongly: at toy size the loss is off by "
            f"{found.loss_error:.1e} and the gradient of {found.worst!r} by "
            f"{found.gradient_error:.1e}",
            hint="choose another schedule or ZeRO stage, and please report this",
        )
    return found


def check_jobs(jobs: Sequence[TrainingJob]) -> list[Agreement]:
    """How far jobs of the same number of ranks are from one device, in one set of processes."""
    exact = [
        replace(job, steps=_STEPS, dtype="float64", wants_gradients=True, learning_rate=1e-2)
        for job in jobs
    ]
    names = [f"rank{rank}" for rank in range(exact[0].division.num_devices)]
    results = run_jobs(exact, names)
    return [
        _agreement(reference_run(job), result) for job, result in zip(exact, results, strict=True)
    ]


def _agreement(reference: DividedReference, result: JobResult) -> Agreement:
    losses = zip(result.losses, reference.losses, strict=True)
    loss_error = _worst(abs(found - expected) for found, expected in losses)
    errors: dict[str, float] = {}
    for gradients in result.gradients.values():
        for name, found in gradients.items():
            expected = reference.gradients[name].flatten()
            difference = float((found - expected).abs().max())
            scale = max(1.0, float(expected.abs().max()))
            errors[name] = _worst((errors.get(name, 0.0), difference / scale))
    missing = reference.gradients.keys() - errors.keys()
    errors |= dict.fromkeys(missing, float("inf"))
    worst = max(errors, key=lambda name: errors[name])
    return Agreement(loss_error=loss_error, gradient_error=errors[worst], worst=worst)


def _worst(errors: Iterable[float]) -> float:
    """The largest of them; infinite where one is not a number, which compares with nothing."""
    return max(math.inf if math.isnan(error) else error for error in errors)
