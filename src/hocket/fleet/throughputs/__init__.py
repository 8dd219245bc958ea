"""How fast kinds of jobs run on kinds of devices: read, predicted, estimated, corrected."""

from __future__ import annotations

from hocket.fleet.throughputs.belief import Belief, belief_from
from hocket.fleet.throughputs.completion import Completed, complete
from hocket.fleet.throughputs.table import (
    Profile,
    Throughputs,
    read_throughputs,
    stacked,
    throughputs_to_dict,
    write_throughputs,
)
from hocket.fleet.throughputs.unseen import Estimated, with_unseen_job

__all__ = [
    "Belief",
    "Completed",
    "Estimated",
    "Profile",
    "Throughputs",
    "belief_from",
    "complete",
    "read_throughputs",
    "stacked",
    "throughputs_to_dict",
    "with_unseen_job",
    "write_throughputs",
]
