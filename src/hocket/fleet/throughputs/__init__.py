"""How fast kinds of jobs run on kinds of devices: read, estimated, corrected by measurements."""

from __future__ import annotations

from hocket.fleet.throughputs.completion import Completed, complete
from hocket.fleet.throughputs.table import Profile, Throughputs, read_throughputs

__all__ = ["Completed", "Profile", "Throughputs", "complete", "read_throughputs"]
