"""Talking to the fleet's daemon."""

from __future__ import annotations

from hocket.service.client import (
    RefusedByServiceError,
    UnreachableError,
    find_service,
    job_path,
    patiently,
)
from hocket.service.records import ENDED

__all__ = [
    "ENDED",
    "RefusedByServiceError",
    "UnreachableError",
    "find_service",
    "job_path",
    "patiently",
]
