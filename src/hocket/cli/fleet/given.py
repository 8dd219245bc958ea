"""Parse the options that describe a fleet: devices, prices, arrival rates and throughput tables."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from hocket.base.errors import UsageError
from hocket.cli.declare import option
from hocket.cli.options import FiniteRange
from hocket.cli.output import say

if TYPE_CHECKING:
    from hocket.base.arrays import FloatArray
    from hocket.fleet.rounds.state import FleetDevice
    from hocket.fleet.throughputs import Throughputs
    from hocket.fleet.traces import Trace

Round = Annotated[
    float,
    option("Length of a round.", "--round", type=FiniteRange(min=0.1, max=1e6), metavar="SECONDS"),
]
_POOL = re.compile(r"([^:]+):0*([1-9]\d{0,7})(?:x0*([1-9]\d{0,7}))?", re.ASCII)
"""Matches ``TYPE:COUNT`` or ``TYPE:COUNTxSIZE`` with SIZE devices per server."""
# Limits that keep a mistyped count from filling the memory.
_MAX_DEVICES = 1_000_000
_MAX_TYPES = 1000
_TABLES = ("throughputs.json", "simulation_throughputs.json", "tacc_throughputs.json")
"""File names of throughput tables, searched beside a trace, in its parent folder and in ``gavel``.
"""


def parse_cluster(
    text: str, option: str = "--cluster"
) -> tuple[tuple[str, ...], tuple[FleetDevice, ...]]:
    """Parse ``v100:36,p100:8x4`` into device types, in the order written, and devices."""
    from hocket.fleet.rounds.state import FleetDevice

    device_types: list[str] = []
    devices: list[FleetDevice] = []
    for part in text.split(","):
        match = _POOL.fullmatch(part.strip())
        if match is None or match[1] in device_types:
            raise UsageError(
                f"cannot read {part.strip()!r} in {option}",
                hint="write each device type once with a count of at least 1, such as v100:36 or "
                "v100:9x4 (9 servers of 4)",
            )
        device_type, per_server = match[1], int(match[3] or 1)
        count = int(match[2]) * per_server
        if len(devices) + count > _MAX_DEVICES:
            raise UsageError(f"{option} has more than {_MAX_DEVICES:,} devices")
        if len(device_types) == _MAX_TYPES:
            raise UsageError(f"{option} has more than {_MAX_TYPES} device types")
        device_types.append(device_type)
        devices += [
            FleetDevice(
                name=f"{device_type}-{at}",
                device_type=device_type,
                server=f"{device_type}/{at // per_server}",
            )
            for at in range(count)
        ]
    return tuple(device_types), tuple(devices)


def job_range(text: str | None, num_jobs: int) -> tuple[int, int] | None:
    """First job and end of a range such as ``4000:5000``; None if no range was given."""
    from hocket.base.units import whole_number

    if text is None:
        return None
    first, end = (whole_number(part, num_jobs) for part in text.partition(":")[::2])
    if first is None or end is None or first >= end:
        hint = f"write A:B with 0 <= A < B <= {num_jobs}, such as 4000:5000"
        raise UsageError(f"cannot take jobs {text[:60]!r} of this trace", hint=hint)
    return first, end


def parse_pairs(
    text: str | None, option: str, hint: str, *, least: float = 0.0, most: float = 1e300
) -> dict[str, float]:
    """Parse ``NAME=NUMBER,...`` into a dictionary."""
    numbers: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, number = (word.strip() for word in part.rpartition("="))
        try:
            value = float(number)
        except ValueError:
            # A value below every allowed minimum, so that the check below refuses it.
            value = -1.0
        if not name or name in numbers or not least <= value <= most:
            raise UsageError(f"cannot read {part.strip()[:60]!r} in {option}", hint=hint)
        numbers[name] = value
    return numbers


def prices_of(text: str | None, device_types: tuple[str, ...]) -> FloatArray:
    """Hourly price of one device of each type from ``v100=2.48,k80=0.45``; 1 for unnamed types."""
    import numpy as np

    hint = "write TYPE=PRICE for device types of --cluster, such as v100=2.48"
    prices = parse_pairs(text, "--prices", hint, most=1e9)
    unknown = [device_type for device_type in prices if device_type not in device_types]
    if unknown:
        raise UsageError(f"cannot read {unknown[0]!r} in --prices", hint=hint)
    return np.array([prices.get(device_type, 1.0) for device_type in device_types])


def find_throughputs(path: Path | None, trace: Path) -> Throughputs | None:
    """The throughput table of a file, or else the first known table beside the trace."""
    from hocket.fleet.throughputs import read_throughputs

    if path is not None:
        return read_throughputs(path)
    folders = (trace.parent, trace.parent.parent / "gavel", trace.parent.parent)
    for candidate in (folder / name for folder in folders for name in _TABLES):
        if candidate.is_file():
            say(f"throughputs from {candidate}")
            return read_throughputs(candidate)
    return None


def with_arrivals(trace: Trace, jobs_per_hour: float | None, seed: int) -> Trace:
    """The trace with Poisson arrivals at this rate; unchanged if the rate is None."""
    if jobs_per_hour is None:
        return trace
    import numpy as np

    gaps_s = np.random.default_rng(seed).exponential(3600.0 / jobs_per_hour, len(trace))
    # The first job arrives at time 0, else every simulation would begin with an idle gap.
    return replace(trace, arrival_s=np.cumsum(gaps_s) - gaps_s[0])
