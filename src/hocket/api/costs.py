"""Measured op times and fitted efficiencies, as files."""

from __future__ import annotations

from hocket.cost.calibrate import calibrate, calibration_errors, read_calibration, write_calibration
from hocket.cost.profile import merge_profiles, read_profile, write_profile

__all__ = [
    "calibrate",
    "calibration_errors",
    "merge_profiles",
    "read_calibration",
    "read_profile",
    "write_calibration",
    "write_profile",
]
