"""Corrections and ranges of predicted steps, fitted to steps that users measured.

A record holds a predicted and a measured step with the device types and costs of the prediction.
The log ratio of measured over predicted is modelled as an offset of the machine plus a residual of
each run, both normal. Without runs the range of the costs holds (`hocket.cost.ranges`); the
residuals' prior is the spread between batches of one model, updated by the spread of the runs. One
run corrects the mean slightly; five runs that agree halve the range.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hocket.base import fields
from hocket.base.errors import UsageError
from hocket.base.jsonfile import read_json
from hocket.cost.ranges import DATASHEET, StepRange, scale_of, source_of
from hocket.hardware.cluster import Cluster

RECORD = "record"
"""Key of the record in the output of ``hocket run --json``."""
SCHEMA = "hocket.run/1"
MAX_FILE_BYTES = 50_000_000
MAX_SECONDS = 1e9
_RESIDUAL = 0.117
"""Standard deviation of log ratios between batches of one model: four of five of the 60 pairs in
``benchmarks/results/2026-11-18-thirdparty-h200.md`` differ by at most 0.21."""
_PRIOR_RUNS = 2
"""Weight of `_RESIDUAL`, in runs, against the spread of the user's own runs."""
_QUANTILE = 1.2816
"""Number of standard deviations that contain 80 % of a normal distribution."""


@dataclass(frozen=True, kw_only=True)
class StepRun:
    """One measured step and its prediction."""

    model: str
    device_types: tuple[str, ...]
    source: str
    """Source of the predicted costs, as `hocket.cost.ranges.source_of` names it."""
    scale: float
    """Correction that was already part of the prediction."""
    predicted_s: float
    measured_s: float

    @property
    def log_ratio(self) -> float:
        """Log ratio of the measured step over the uncorrected prediction."""
        return math.log(self.measured_s / self.predicted_s * self.scale)


def run_record(
    model: str,
    cluster: Cluster,
    settings: Mapping[str, Any],
    predicted_s: float,
    measured_s: float,
) -> dict[str, Any]:
    """JSON record of a measured step, for ``hocket calibrate --from`` and ``validate --mine``."""
    return {
        "schema": SCHEMA,
        "model": model,
        "device_types": [kind.name for kind in cluster.kinds],
        "source": source_of(settings),
        "scale": scale_of(settings),
        "predicted_s": predicted_s,
        "measured_s": measured_s,
    }


def read_runs(paths: Sequence[str | Path]) -> list[StepRun]:
    """Read records from files; raises `InputFileError` for anything else."""
    return [_read(path) for path in paths]


def _read(path: str | Path) -> StepRun:
    data = read_json(path, MAX_FILE_BYTES)
    with fields.located(str(path)):
        if isinstance(data, dict) and RECORD in data:
            data = data[RECORD]
        names = ("schema", "model", "device_types", "source", "scale", "predicted_s", "measured_s")
        top = fields.record(data, "the record of a run", required=names)
        fields.choice(top["schema"], "schema", (SCHEMA,))
        types = fields.items(top["device_types"], "device_types")
        return StepRun(
            model=fields.text(top["model"], "model"),
            device_types=tuple(fields.text(name, "device_types") for name in types),
            source=fields.text(top["source"], "source"),
            scale=fields.number(top["scale"], "scale", 1e-6, 1e6),
            predicted_s=fields.number(top["predicted_s"], "predicted_s", 1e-9, MAX_SECONDS),
            measured_s=fields.number(top["measured_s"], "measured_s", 1e-9, MAX_SECONDS),
        )


def fit_steps(runs: Sequence[StepRun]) -> Mapping[str, StepRange]:
    """Correction and 80 % range of steps for each device type of the runs."""
    for run in runs:
        if run.source not in ("datasheet", "runs"):
            raise UsageError(
                f"the step of {run.model!r} was predicted with {run.source} costs, which runs do "
                "not correct",
                hint="plan without --profile and with a calibration of runs alone, and run again",
            )
    by_type: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for name in run.device_types:
            by_type[name].append(run.log_ratio)
    return MappingProxyType({name: _fitted(ratios) for name, ratios in sorted(by_type.items())})


def _fitted(ratios: Sequence[float]) -> StepRange:
    low, high = math.log(DATASHEET.low), math.log(DATASHEET.high)
    prior, total = (low + high) / 2, (high - low) / (2 * _QUANTILE)
    count, mean = len(ratios), math.fsum(ratios) / len(ratios)
    spread = math.fsum((ratio - mean) ** 2 for ratio in ratios)
    # Bayesian update of the variance: the prior counts as `_PRIOR_RUNS` runs.
    residual = (_PRIOR_RUNS * _RESIDUAL**2 + spread) / (_PRIOR_RUNS + count - 1)
    shift = max(total**2 - _RESIDUAL**2, 0.0)
    # Shrinkage: the more runs, the more of the mean deviation is attributed to the machine.
    known = shift / (shift + residual / count)
    centre = prior + known * (mean - prior)
    half = _QUANTILE * math.sqrt(residual + (1 - known) * shift)
    return StepRange(
        math.exp(-half), math.exp(half), count, DATASHEET.ratio, f"{count} runs of users",
        scale=math.exp(centre),
    )  # fmt: skip
