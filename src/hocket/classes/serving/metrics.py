"""Metrics of a running front end: times of answers and parts, late and dead workers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hocket.classes.serving.link import Counts


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of the last few thousand times."""

    count: int
    p50_s: float | None
    p99_s: float | None


@dataclass(frozen=True)
class WorkerMetrics:
    """Metrics of one worker."""

    is_alive: bool
    answered: int
    late: int
    deaths: int
    restarts: int
    compute: Quantiles
    round_trip: Quantiles


@dataclass(frozen=True)
class Metrics:
    """Metrics of a front end and its workers."""

    answers: Quantiles
    workers: tuple[WorkerMetrics, ...]

    def to_data(self) -> dict[str, Any]:
        """Return JSON-serialisable data."""
        return asdict(self)


def metrics_of(times_ns: Iterable[int], workers: Sequence[tuple[bool, Counts]]) -> Metrics:
    """Quantiles of the recorded times."""
    return Metrics(
        _quantiles(times_ns),
        tuple(
            WorkerMetrics(
                is_alive,
                counts.answered,
                counts.late,
                counts.deaths,
                counts.restarts,
                _quantiles(counts.compute_ns),
                _quantiles(counts.round_trip_ns),
            )
            for is_alive, counts in workers
        ),
    )


def _quantiles(times_ns: Iterable[int]) -> Quantiles:
    # A copy, because other threads append meanwhile.
    taken = list(times_ns)
    if not taken:
        return Quantiles(0, None, None)
    p50, p99 = np.quantile(taken, [0.5, 0.99]) * 1e-9
    return Quantiles(len(taken), float(p50), float(p99))
