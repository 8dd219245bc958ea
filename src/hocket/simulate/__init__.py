"""One event engine: compute, transfers with contention, memory."""

from hocket.simulate.analysis import (
    PathStep,
    PathSummary,
    bottleneck,
    channel_busy_s,
    critical_path,
    device_busy_s,
    summarize,
)
from hocket.simulate.engine import home_devices, kernels_are_compiled, simulate
from hocket.simulate.timeline import Timeline

__all__ = [
    "PathStep",
    "PathSummary",
    "Timeline",
    "bottleneck",
    "channel_busy_s",
    "critical_path",
    "device_busy_s",
    "home_devices",
    "kernels_are_compiled",
    "simulate",
    "summarize",
]
