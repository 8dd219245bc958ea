"""Throughputs of job types on device types: read from files, predicted, estimated."""

from __future__ import annotations

from hocket.fleet.throughputs.table import (
    JobProfile,
    Throughputs,
    read_throughputs,
    stacked,
    throughputs_to_dict,
    write_throughputs,
)

__all__ = [
    "JobProfile",
    "Throughputs",
    "read_throughputs",
    "stacked",
    "throughputs_to_dict",
    "write_throughputs",
]
