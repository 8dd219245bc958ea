"""The predictor of divisions, fitted to measured runs."""

from __future__ import annotations

from hocket.cost.parallel.calibrate import calibrate, prediction_errors
from hocket.cost.parallel.measurements import read_runs

__all__ = [
    "calibrate",
    "prediction_errors",
    "read_runs",
]
