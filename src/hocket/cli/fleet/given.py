"""Options that describe a fleet: devices, prices, jobs of a trace, its throughputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hocket.base.errors import UsageError
from hocket.cli.output import say

if TYPE_CHECKING:
    from hocket.base.arrays import FloatArray
    from hocket.fleet.rounds.state import FleetDevice
    from hocket.fleet.throughputs import Throughputs
    from hocket.fleet.traces import Trace

_MAX_DEVICES = 1_000_000
_MAX_KINDS = 1000
_TABLES = ("throughputs.json", "simulation_throughputs.json", "tacc_throughputs.json")
"""Tables that are looked for beside a trace, and in the folder ``gavel`` beside its folder."""


def parse_cluster(
    text: str, option: str = "--cluster"
) -> tuple[tuple[str, ...], tuple[FleetDevice, ...]]:
    """Kinds in order and devices of ``v100:36,p100:8x4``."""
    from hocket.api.fleet import FleetDevice

    kinds: list[str] = []
    devices: list[FleetDevice] = []
    for part in text.split(","):
        kind, _, amount = part.strip().partition(":")
        count, _, size = amount.partition("x")
        is_right = (
            kind and count.isdecimal() and (not size or size.isdecimal()) and len(amount) < 16
        )
        if not is_right or kind in kinds or int(count) < 1 or (size and int(size) < 1):
            raise UsageError(
                f"cannot read {part.strip()!r} in {option}",
                hint="write each kind once, such as v100:36 or v100:9x4 (9 servers of 4)",
            )
        per_server = int(size or 1)
        if len(devices) + int(count) * per_server > _MAX_DEVICES:
            raise UsageError(f"{option} has more than {_MAX_DEVICES:,} devices")
        if len(kinds) == _MAX_KINDS:
            raise UsageError(f"{option} has more than {_MAX_KINDS} kinds")
        kinds.append(kind)
        devices += [
            FleetDevice(name=f"{kind}-{at}", kind=kind, server=f"{kind}/{at // per_server}")
            for at in range(int(count) * per_server)
        ]
    return tuple(kinds), tuple(devices)


def job_range(text: str | None, num_jobs: int) -> tuple[int, int] | None:
    """The first job and the end of ``4000:5000``; None where nothing was written."""
    from hocket.base.units import whole_number

    if text is None:
        return None
    first, end = (whole_number(part, num_jobs) for part in text.partition(":")[::2])
    if first is None or end is None or first >= end:
        hint = f"write A:B with 0 <= A < B <= {num_jobs}, such as 4000:5000"
        raise UsageError(f"cannot take jobs {text[:60]!r} of this trace", hint=hint)
    return first, end


def prices_of(text: str | None, kinds: tuple[str, ...]) -> FloatArray:
    """The price per hour of a device of each kind in ``v100=2.48,k80=0.45``."""
    import numpy as np

    prices = dict.fromkeys(kinds, 1.0)
    for part in text.split(",") if text else ():
        kind, _, price = part.strip().partition("=")
        try:
            value = float(price)
        except ValueError:
            value = -1.0
        if kind not in prices or not 0.0 <= value < 1e9:
            hint = "write KIND=PRICE for kinds of --cluster, such as v100=2.48"
            raise UsageError(f"cannot read {part.strip()!r} in --prices", hint=hint)
        prices[kind] = value
    return np.array([prices[kind] for kind in kinds])


def find_throughputs(path: Path | None, trace: Path) -> Throughputs | None:
    """The table of a file, or one that lies beside the trace."""
    from hocket.api.fleet import read_throughputs

    if path is not None:
        return read_throughputs(path)
    folders = (trace.parent, trace.parent.parent / "gavel", trace.parent.parent)
    for candidate in (folder / name for folder in folders for name in _TABLES):
        if candidate.is_file():
            say(f"throughputs from {candidate}")
            return read_throughputs(candidate)
    return None


def with_arrivals(trace: Trace, jobs_per_hour: float | None, seed: int) -> Trace:
    """The trace with arrivals drawn at this rate, where one is given."""
    if jobs_per_hour is None:
        return trace
    import numpy as np

    gaps_s = np.random.default_rng(seed).exponential(3600.0 / jobs_per_hour, len(trace))
    return replace(trace, arrival_s=np.cumsum(gaps_s) - gaps_s[0])
