"""How far measured steps lie from predicted ones: an 80 % range for each source of costs.

Ends are the 10 % and 90 % quantiles of measured over predicted step times, from the rows that each
source names. Datasheet ranges hold for eager steps on one GPU whose host was not measured.
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
            0.93, 1.28, 120,
            "35 third-party models on an H200, 17 of them held out "
            "(benchmarks/results/2026-11-18-thirdparty-h200.md)",
        ),
        "calibrated": StepRange(
            0.95, 1.20, 7, "benchmarks/results/2026-11-16-predict-configs-calibrated-h200.md"
        ),
        "profiled": StepRange(
            0.98, 1.18, 21,
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
