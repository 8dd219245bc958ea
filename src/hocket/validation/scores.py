"""How far predictions are from measurements: errors, rankings and memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.validation.rows import Measured


@dataclass(frozen=True, kw_only=True)
class ErrorScore:
    """Relative errors of predictions; all but ``bias`` are of absolute values."""

    rows: int
    mean: float
    median: float
    p95: float
    max: float
    bias: float
    """Mean with signs: positive where predictions are too large."""


@dataclass(frozen=True, kw_only=True)
class RankingScore:
    """What a choice by prediction loses inside groups of measured alternatives."""

    groups: int
    mean_regret: float
    """How much longer the chosen run is than the best one."""
    max_regret: float
    kendall_tau: float
    """Agreement of the two orders: 1 the same, 0 unrelated, -1 reversed."""


@dataclass(frozen=True, kw_only=True)
class OutOfMemoryScore:
    """Runs that ended for lack of memory, and those that did not."""

    ran_out: int
    missed: int
    """Ran out, predicted to fit."""
    ran: int
    false_alarms: int
    """Ran, predicted not to fit."""


def error_score(errors: FloatArray) -> ErrorScore | None:
    """The summary of relative errors; None where there are none."""
    if not len(errors):
        return None
    sizes = np.abs(errors)
    return ErrorScore(
        rows=len(errors),
        mean=float(sizes.mean()),
        median=float(np.median(sizes)),
        p95=float(np.percentile(sizes, 95)),
        max=float(sizes.max()),
        bias=float(errors.mean()),
    )


def ranking_score(rows: Sequence[Measured], predicted_s: FloatArray) -> RankingScore | None:
    """Rankings inside groups of runs of one model, on as many devices, with one batch."""
    measured_s = np.array([row.step_s for row in rows], dtype=np.float64)
    groups: dict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        division = row.division
        groups[row.model, division.num_devices, division.global_batch].append(index)
    several = [np.array(group) for group in groups.values() if len(group) > 1]
    if not several:
        return None
    regrets = [_regret(measured_s[group], predicted_s[group]) for group in several]
    taus = [kendall_tau(measured_s[group], predicted_s[group]) for group in several]
    return RankingScore(
        groups=len(several),
        mean_regret=float(np.mean(regrets)),
        max_regret=float(np.max(regrets)),
        kendall_tau=float(np.mean(taus)),
    )


def kendall_tau(first: FloatArray, second: FloatArray) -> float:
    """Pairs in the same order less pairs in opposite order, of all pairs; ties count for none."""
    one = np.sign(first[:, None] - first[None, :])
    other = np.sign(second[:, None] - second[None, :])
    num_pairs = len(first) * (len(first) - 1)
    return float((one * other).sum() / num_pairs) if num_pairs else 1.0


def out_of_memory_score(
    rows: Sequence[Measured], predicted_bytes: FloatArray, capacity_bytes: FloatArray
) -> OutOfMemoryScore | None:
    """Whether runs that ran out of memory are told from those that did not."""
    if not rows:
        return None
    ran_out = np.array([row.is_oom for row in rows], dtype=bool)
    too_large = predicted_bytes > capacity_bytes
    return OutOfMemoryScore(
        ran_out=int(ran_out.sum()),
        missed=int((ran_out & ~too_large).sum()),
        ran=int((~ran_out).sum()),
        false_alarms=int((~ran_out & too_large).sum()),
    )


def _regret(measured_s: FloatArray, predicted_s: FloatArray) -> float:
    chosen_s = measured_s[int(np.argmin(predicted_s))]
    return float(chosen_s / measured_s.min() - 1.0)
