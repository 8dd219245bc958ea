"""Fit the coefficients of the step predictor to a few measured runs of one cluster.

The logarithm of measured over predicted step time is modelled as a sum of three unknown terms: the
logarithms of the coefficients, with a normal prior as wide as clusters differ (`SPREAD`); an error
that the formulas do not explain and that similar runs share (`similarity`); and noise. If all are
normal and the step is linear in the coefficients, their most likely values solve one linear system
(kriging with a trend; Kennedy and O'Hagan 2001). The step is linearized again around each solution,
and outliers are given more noise (soft L1). So a few runs move predictions little, and far from all
runs only the coefficients apply. About a dozen evaluations of all runs per round, O(runs^3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.base.errors import UsageError
from hocket.cost.parallel.coefficients import (
    MAX_COEFFICIENT,
    MIN_COEFFICIENT,
    NAMES,
    Anchor,
    Coefficients,
)
from hocket.cost.parallel.measured_runs import MeasuredRun
from hocket.cost.parallel.setting import Setting, setting_of, stack_settings
from hocket.cost.parallel.similarity import UNEXPLAINED, factors, similarity_of_runs
from hocket.cost.parallel.step import predict_settings, slowest_kind
from hocket.hardware.cluster import Cluster
from hocket.transformer import ParallelConfigs

MIN_RUNS = 3
NOISE = 0.04
"""Relative difference between two runs of the same configuration: 3 to 8 % in BLOOM's search."""
OUTLIER = 1.5
"""Multiple of the noise beyond which a run loses weight."""
MOST_OFF = 50.0
"""Largest credible ratio of measured and predicted time; beyond it the unit must be wrong."""
_NUM_ROUNDS = 4
_NUM_TRUST_ROUNDS = 8
_SMALL = 0.02
"""Change of a coefficient's logarithm for the finite differences of `_Runs.slopes`."""
SPREAD: Mapping[str, float] = {
    "matrix": 0.045,
    "shape": 0.18,
    "attention": 0.12,
    "unaligned": 0.2,
    "memory": 0.09,
    "host": 0.2,
    "layer": 0.2,
    "tensor": 0.14,
    "latency": 0.14,
    "network": 0.11,
    "pipeline": 0.11,
    "gradients": 0.18,
}
"""Prior standard deviation of each coefficient's logarithm; the prior mean is 0 (coefficient 1)."""


@dataclass(frozen=True, eq=False)
class _Runs:
    """Measured runs as arrays, one entry per run."""

    runs: Sequence[MeasuredRun]
    setting: Setting
    configs: ParallelConfigs
    measured_s: FloatArray

    def log_errors(self, coefficients: Coefficients) -> FloatArray:
        """Logarithm of predicted over measured step time of each run, without anchors."""
        setting = replace(self.setting, coefficients=coefficients)
        predicted_s = predict_settings(setting, self.configs)
        return np.log(predicted_s / self.measured_s)

    def slopes(self, logarithms: FloatArray) -> FloatArray:
        """[run, coefficient]: derivative of the step's logarithm by the coefficient's logarithm."""
        here = self.log_errors(_coefficients(logarithms))
        found = np.empty((len(here), len(NAMES)))
        for position in range(len(NAMES)):
            step = np.zeros(len(NAMES))
            step[position] = _SMALL
            # Forward differences: one more evaluation per coefficient is enough for a nearly linear
            # step.
            higher = self.log_errors(_coefficients(logarithms + step))
            found[:, position] = (higher - here) / _SMALL
        return found


def calibrate(
    runs: Sequence[MeasuredRun], cluster: Cluster, source: str = "", noise: float = NOISE
) -> Coefficients:
    """Fit the coefficients to runs on one cluster; runs without a step time are left out."""
    timed = _timed(runs, cluster)
    _refuse_other_units(timed)
    places, shared = similarity_of_runs(timed.runs)
    logarithms, weights = _most_likely(timed, UNEXPLAINED**2 * shared, noise)
    anchors = tuple(
        Anchor(
            program=run.software.name,
            place=tuple(place.tolist()),
            weight=UNEXPLAINED**2 * float(weight),
        )
        for run, place, weight in zip(timed.runs, places, weights, strict=True)
    )
    source = source or f"{len(timed.measured_s)} runs on {cluster.name}"
    return replace(_coefficients(logarithms, source), anchors=anchors)


def _refuse_other_units(timed: _Runs) -> None:
    """Raise `UsageError` if a run is off by more than `MOST_OFF`: its times are in another unit."""
    errors = timed.log_errors(Coefficients())
    worst = int(np.argmax(np.abs(errors)))
    if abs(errors[worst]) > np.log(MOST_OFF):
        measured_s = float(timed.measured_s[worst])
        predicted_s = measured_s * float(np.exp(errors[worst]))
        raise UsageError(
            f"run {worst + 1} took {measured_s:.3g} s where {predicted_s:.3g} s are predicted",
            hint="are its times seconds (else step_ms), and is it of this cluster and model?",
        )


def _most_likely(timed: _Runs, shared: FloatArray, noise: float) -> tuple[FloatArray, FloatArray]:
    """Most likely logarithms of the coefficients, and the kriging weight of each run.

    ``shared`` is the covariance [run, run] of the errors that no coefficient explains.
    """
    spread = np.array([SPREAD[name] for name in NAMES])
    logarithms: FloatArray = np.zeros(len(NAMES))
    weights: FloatArray = np.zeros(len(shared))
    for _ in range(_NUM_ROUNDS):
        slopes = timed.slopes(logarithms)
        # Errors at coefficients 1, extrapolated along the slopes.
        errors = timed.log_errors(_coefficients(logarithms)) - slopes @ logarithms
        scaled = slopes * spread
        weights = _robust_weights(scaled @ scaled.T + shared, errors, noise)
        logarithms = np.asarray(spread * (scaled.T @ weights), np.float64)
    return logarithms, weights


def _robust_weights(covariance: FloatArray, errors: FloatArray, noise: float) -> FloatArray:
    """Kriging weights for errors with this covariance, with less weight on outliers (soft L1)."""
    trust: FloatArray = np.ones(len(errors))
    weights: FloatArray = np.zeros(len(errors))
    for _ in range(_NUM_TRUST_ROUNDS):
        variance = noise**2 / trust
        weights = np.asarray(np.linalg.solve(covariance + np.diag(variance), -errors), np.float64)
        # Unexplained part of each run, in multiples of the noise.
        left = np.abs(variance * weights) / noise
        # Soft L1: far beyond the noise, trust falls in proportion to the deviation.
        trust = 1 / np.sqrt(1 + (left / OUTLIER) ** 2)
    return weights


def prediction_errors(
    runs: Sequence[MeasuredRun], cluster: Cluster, coefficients: Coefficients
) -> FloatArray:
    """Predicted over measured step time, minus one, for each run with a step time."""
    timed = _timed(runs, cluster)
    factor = [
        factors(
            coefficients.anchors, run.model, run.software, ParallelConfigs.of([run.config])
        ).item()
        for run in timed.runs
    ]
    return np.asarray(np.array(factor) * np.exp(timed.log_errors(coefficients)) - 1)


def _timed(runs: Sequence[MeasuredRun], cluster: Cluster) -> _Runs:
    timed = [run for run in runs if run.step_s is not None]
    if len(timed) < MIN_RUNS:
        raise UsageError(
            f"{len(timed)} measured runs are too few to fit anything",
            hint=f"measure at least {MIN_RUNS}, better ten that differ in degrees and microbatch",
        )
    network = cluster.network
    settings = [
        setting_of(run.model, run.software, slowest_kind(cluster, run.software), network)
        for run in timed
    ]
    largest = max(run.config.num_devices for run in timed)
    if largest > network.num_devices:
        raise UsageError(
            f"a run used {largest} devices but {cluster.name!r} has {network.num_devices}",
            hint="name the cluster that the runs were measured on, such as 64xdgx-a100-80g",
        )
    return _Runs(
        timed,
        stack_settings(settings),
        ParallelConfigs.of(run.config for run in timed),
        np.array([run.step_s for run in timed], dtype=np.float64),
    )


def _coefficients(logarithms: FloatArray, source: str = "") -> Coefficients:
    values = np.clip(np.exp(logarithms), MIN_COEFFICIENT, MAX_COEFFICIENT)
    return Coefficients(**dict(zip(NAMES, values.tolist(), strict=True)), source=source)
