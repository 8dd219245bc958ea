"""How far measured steps lie from predicted ones: an 80 % range for each source of costs.

Ends are the 10 % and 90 % quantiles of measured over predicted step times over all rows of the
tables that each source names (``benchmarks/predict/ranges.py`` computes them). All rows are eager
steps on one H200: ranges of other GPUs and of plans for several devices are assumed to be the same.
Rows of the calibrated and profiled ranges are older than the kernel costs of 2026-11-18.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class StepRange:
    """Measured over predicted step times that four of five rows lie between."""

    low: float
    high: float
    rows: int
    source: str


RANGES: Mapping[str, StepRange] = MappingProxyType(
    {
        "datasheet": StepRange(
            0.92, 1.29, 124,
            "36 third-party models on an H200; constants were chosen with 19 of them "
            "(benchmarks/results/2026-11-18-thirdparty-h200.md)",
        ),
        "calibrated": StepRange(
            0.79, 1.45, 19, "benchmarks/results/2026-11-16-predict-configs-calibrated-h200.md"
        ),
        "profiled": StepRange(
            0.99, 1.23, 36,
            "benchmarks/results/2026-11-16-predict-configs-h200.md and -calibrated-h200.md",
        ),
    }
)  # fmt: skip


def source_of(settings: Mapping[str, Any]) -> str:
    """Where costs with these settings come from."""
    if settings.get("profile") is not None:
        return "profiled"
    return "datasheet" if settings.get("calibration") is None else "calibrated"


def step_range_s(step_s: float, settings: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds between which four of five measured steps lie."""
    found = RANGES[source_of(settings)]
    return found.low * step_s, found.high * step_s
