"""The simulator: an event engine for compute, transfers with contention, and memory."""

from hocket.simulate.analysis import (
    PathStep,
    PathSummary,
    bottleneck,
    channel_busy_s,
    critical_path,
    summarize,
)
from hocket.simulate.engine import kernels_are_compiled, simulate
from hocket.simulate.lowering import owner_devices
from hocket.simulate.timeline import Timeline

__all__ = [
    "PathStep",
    "PathSummary",
    "Timeline",
    "bottleneck",
    "channel_busy_s",
    "critical_path",
    "kernels_are_compiled",
    "owner_devices",
    "simulate",
    "summarize",
]
