"""The simulator: an event engine for compute, transfers with contention, and memory.

`engine` simulates plans, `evaluate` scores many plans of one problem, `events` is the compiled
engine. `parallel` expands parallel plans into one graph, `rewriting` applies memory sections.
"""

from hocket.simulate.analysis import (
    PathStep,
    bottleneck,
    channel_busy_s,
    critical_path,
    path_seconds,
)
from hocket.simulate.engine import kernels_are_compiled, simulate
from hocket.simulate.lowering import owner_devices
from hocket.simulate.timeline import Timeline

__all__ = [
    "PathStep",
    "Timeline",
    "bottleneck",
    "channel_busy_s",
    "critical_path",
    "kernels_are_compiled",
    "owner_devices",
    "path_seconds",
    "simulate",
]
