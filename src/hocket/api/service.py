"""Client of the fleet's daemon."""

from __future__ import annotations

from hocket.service.client import (
    RefusedByServiceError,
    UnreachableError,
    find_service,
    job_path,
    patiently,
)
from hocket.service.executors.cgroups import describe_limits, find_cgroups
from hocket.service.records import ENDED
from hocket.service.shell_job import SCRIPT as SHELL_JOB

__all__ = [
    "ENDED",
    "SHELL_JOB",
    "RefusedByServiceError",
    "UnreachableError",
    "describe_limits",
    "find_cgroups",
    "find_service",
    "job_path",
    "patiently",
]
