"""One event engine: compute, transfers with contention, memory."""

from hocket.simulate.analysis import (
    PathStep,
    PathSummary,
    bottleneck,
    channel_busy_s,
    critical_path,
    summarize,
)
from hocket.simulate.engine import kernels_are_compiled, simulate
from hocket.simulate.lowering import home_devices
from hocket.simulate.timeline import Timeline

__all__ = [
    "PathStep",
    "PathSummary",
    "Timeline",
    "bottleneck",
    "channel_busy_s",
    "critical_path",
    "home_devices",
    "kernels_are_compiled",
    "simulate",
    "summarize",
]
