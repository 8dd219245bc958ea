"""How fast kinds of jobs run on kinds of devices: read, predicted, estimated, corrected."""

from __future__ import annotations

from hocket.fleet.throughputs.completion import Completed, complete
from hocket.fleet.throughputs.table import (
    Profile,
    Throughputs,
    read_throughputs,
    stacked,
    throughputs_to_dict,
    write_throughputs,
)

__all__ = [
    "Completed",
    "Profile",
    "Throughputs",
    "complete",
    "read_throughputs",
    "stacked",
    "throughputs_to_dict",
    "write_throughputs",
]
