"""Throughputs of kinds of jobs on kinds of devices: read, predicted, corrected."""

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
