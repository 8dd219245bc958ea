"""80 % ranges of predicted steps, and of ratios of two steps, for each source of costs.

Ends are the 10 % and 90 % quantiles of measured over predicted step times in the tables that each
source names (``benchmarks/predict/ranges.py`` computes them). All rows are eager steps on one H200:
for other GPUs and for plans on several devices the same ranges are an assumption. Rows of the
calibrated and profiled ranges are older than the kernel costs of 2026-11-18.

On one device, steps that wait for the host have a wider range than the others: hosts of equal
machines differ, and the speed of a host changes by a third within minutes.

Two candidates of one problem share model, devices and most kernels, so their errors are correlated
and the range of their *ratio* is narrower than that of a step. It comes from pairs of published
runs of one model on equally many devices of one site that differ in their parallel config (same
script, 3,353 pairs of 11 tables; calibrated with ten runs per site, 2,818).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hocket.cost.costs import Costs
from hocket.cost.rates import RATES


@dataclass(frozen=True)
class StepRange:
    """Interval of measured over predicted step times that contains 80 % of the rows."""

    low: float
    high: float
    rows: int
    ratio: float
    """80 % of measured ratios of two steps are within this relative distance of the predicted
    ratio."""
    source: str
    scale: float = 1.0
    """Correction of predicted steps if runs on this device type were measured."""


RANGES: Mapping[str, StepRange] = MappingProxyType(
    {source: StepRange(**found) for source, found in RATES["ranges"].items()}
)
"""Ranges by source of costs."""
DATASHEET = RANGES["datasheet"]
"""Range of steps on several devices, which no row was measured on."""


def source_of(settings: Mapping[str, Any]) -> str:
    """Source of costs with these settings: datasheet, calibrated, profiled, or users' runs."""
    if settings.get("profile") is not None:
        return "profiled"
    calibration = settings.get("calibration")
    if calibration is None:
        return "datasheet"
    return "runs" if calibration.get("steps") else "calibrated"


def step_range(costs: Costs) -> StepRange:
    """Range of steps predicted with these costs.

    With several device types that have measured runs, the widest range counts.
    """
    source = source_of(costs.settings)
    if source == "runs":
        return _range_of_runs(costs.settings)
    if source == "datasheet" and len(costs.device_row) == 1:
        return RANGES[f"datasheet, {'host' if costs.is_host_bound else 'device'}-bound"]
    return RANGES[source]


def _range_of_runs(settings: Mapping[str, Any]) -> StepRange:
    found = [StepRange(**values) for values in settings["calibration"]["steps"].values()]
    return max(found, key=lambda each: each.high / each.low)


def scale_of(settings: Mapping[str, Any]) -> float:
    """Correction of predicted steps by measured runs."""
    return _range_of_runs(settings).scale if source_of(settings) == "runs" else 1.0


def ratio_range(costs: Costs) -> float:
    """Relative difference below which the order of two predicted steps is uncertain."""
    return step_range(costs).ratio
