"""Fit the coefficients of the step predictor to a few measured runs of one cluster.

Regularised least squares on the logarithm of predicted over measured time: every coefficient is
expected to be 1 and may leave it as far as clusters are known to differ, so that ten runs are
enough for twelve numbers and a coefficient that no run depends on stays 1. A run that no
coefficients explain counts less the further off it is (soft L1), for single runs are often slow for
reasons of their own. About twenty evaluations per coefficient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.cost.parallel.coefficients import (
    MAX_COEFFICIENT,
    MIN_COEFFICIENT,
    NAMES,
    Coefficients,
)
from hocket.cost.parallel.network import network_of
from hocket.cost.parallel.setting import Setting, setting_of, stack_settings
from hocket.cost.parallel.software import Software
from hocket.cost.parallel.step import predict_settings, slowest_kind
from hocket.hardware.cluster import Cluster
from hocket.transformer import Division, Divisions, Transformer

MIN_RUNS = 3
NOISE = 0.06
"""Relative difference between runs that the model is not expected to explain."""
OUTLIER = 1.0
"""Multiple of the noise beyond which a run counts less."""
SPREAD: Mapping[str, float] = {
    "matrix": 0.06,
    "shape": 0.25,
    "attention": 0.18,
    "unaligned": 0.30,
    "memory": 0.12,
    "host": 0.30,
    "layer": 0.30,
    "tensor": 0.20,
    "latency": 0.20,
    "network": 0.15,
    "pipeline": 0.15,
    "gradients": 0.25,
}
"""How far a coefficient is expected from 1, as a standard deviation of its logarithm."""


class MeasuredRun(Protocol):
    """A run whose step was timed."""

    @property
    def model(self) -> Transformer:
        """What was trained."""

    @property
    def division(self) -> Division:
        """How."""

    @property
    def software(self) -> Software:
        """With what."""

    @property
    def step_s(self) -> float | None:
        """Measured seconds per step; None where the run gave none."""


@dataclass(frozen=True, eq=False)
class _Runs:
    """Measured runs as arrays."""

    setting: Setting
    divisions: Divisions
    measured_s: FloatArray

    def log_errors(self, coefficients: Coefficients) -> FloatArray:
        predicted_s = predict_settings(self.setting, self.divisions, coefficients)
        return np.log(predicted_s / self.measured_s)


def calibrate(runs: Sequence[MeasuredRun], cluster: Cluster, source: str = "") -> Coefficients:
    """The coefficients that best explain runs on one cluster; runs without a time are left out."""
    from scipy.optimize import least_squares

    timed = _timed(runs, cluster)
    spread = np.array([SPREAD[name] for name in NAMES])

    def residuals(position: FloatArray) -> FloatArray:
        errors = timed.log_errors(_coefficients(position * spread))
        return np.concatenate([_softened(errors / NOISE), position])

    fit = least_squares(residuals, np.zeros(len(NAMES)), max_nfev=60)
    source = source or f"{len(timed.measured_s)} runs on {cluster.name}"
    return _coefficients(fit.x * spread, source)


def prediction_errors(
    runs: Sequence[MeasuredRun], cluster: Cluster, coefficients: Coefficients
) -> FloatArray:
    """Predicted over measured step time, less one, for each run that was timed."""
    return np.expm1(_timed(runs, cluster).log_errors(coefficients))


def _timed(runs: Sequence[MeasuredRun], cluster: Cluster) -> _Runs:
    timed = [run for run in runs if run.step_s is not None]
    if len(timed) < MIN_RUNS:
        raise UsageError(
            f"{len(timed)} measured runs are too few to fit anything",
            hint=f"measure at least {MIN_RUNS}, better ten that differ in degrees and microbatch",
        )
    network = network_of(cluster)
    settings = [
        setting_of(run.model, run.software, slowest_kind(cluster, run.software), network)
        for run in timed
    ]
    largest = max(run.division.num_devices for run in timed)
    if largest > network.num_devices:
        raise UsageError(
            f"a run used {largest} devices but {cluster.name!r} has {network.num_devices}",
            hint="name the cluster that the runs were measured on, such as 64xdgx-a100-80g",
        )
    return _Runs(
        stack_settings(settings),
        Divisions.of(run.division for run in timed),
        np.array([run.step_s for run in timed], dtype=np.float64),
    )


def _coefficients(logarithms: FloatArray, source: str = "") -> Coefficients:
    values = np.clip(np.exp(logarithms), MIN_COEFFICIENT, MAX_COEFFICIENT)
    return Coefficients(**dict(zip(NAMES, values.tolist(), strict=True)), source=source)


def _softened(errors: FloatArray) -> FloatArray:
    """Errors whose squares grow only linearly beyond `OUTLIER`."""
    scaled = (errors / OUTLIER) ** 2
    return np.asarray(np.sign(errors) * OUTLIER * np.sqrt(2 * (np.sqrt(1 + scaled) - 1)))
