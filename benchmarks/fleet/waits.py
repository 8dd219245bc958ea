"""Average completion times of public traces, and what wide jobs wait, by policy.

    python benchmarks/fleet/waits.py [DATA] [--policy las,fifo] [--only NAME] [--restart 30]

DATA is a folder with the public traces. Prints a row per trace and policy: average, 99th percentile
and makespan in hours, and the longest wait from arrival to first start of jobs with four devices or
more. ``gavel-multi`` is the published workload with gangs at 2.6 jobs per hour (jobs 4000 to 4999),
with a row for Gavel's own rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from gavel_cluster import DATA, DEVICE_TYPES, devices_of_each_type, gavel_table
from published import published_trace

from hocket.fleet.rounds import FleetDevice, Rules
from hocket.fleet.simulator import FleetRun, TraceWork, bind, simulate
from hocket.fleet.traces import read_trace

Case = tuple[str, TraceWork, tuple[FleetDevice, ...], tuple[int, int] | None]


def _devices(device_type: str, count: int, per_server: int) -> tuple[FleetDevice, ...]:
    return tuple(
        FleetDevice(
            name=f"{device_type}-{index}",
            device_type=device_type,
            server=f"{device_type}-{index // per_server}",
        )
        for index in range(count)
    )


def cases(data: Path) -> Iterator[Case]:
    """Traces with the clusters that they run on."""
    table = gavel_table(data)
    for name in ("120jobs_100_40", "220jobs_100_25"):
        trace = read_trace(data / "shockwave" / f"shockwave_{name}.trace")
        work = bind(trace, ("v100",), table)
        yield f"shockwave-{name}", work, _devices("v100", 32, 4), None
        mixed = bind(trace, DEVICE_TYPES, table)
        yield f"shockwave-{name}-mixed", mixed, devices_of_each_type(12), None
    trace = read_trace(data / "pollux" / "workloads" / "workload-1.csv")
    yield "pollux-1", bind(trace, ("v100",), None), _devices("v100", 64, 4), None
    trace = read_trace(data / "tiresias" / "60_job.csv")
    yield "tiresias-60", bind(trace, ("v100",), None), _devices("v100", 32, 4), None
    published = bind(published_trace(table, 16_000, 2.6, has_gangs=True), DEVICE_TYPES, table)
    yield "gavel-multi", published, devices_of_each_type(36), (4000, 5000)


def _row(name: str, policy: str, work: TraceWork, run: FleetRun) -> str:
    figures = run.figures()
    wide = (work.trace.gang >= 4) & np.isfinite(run.start_s)
    waits_s = (run.start_s - run.arrival_s)[wide]
    longest_h = float(waits_s.max(initial=0.0)) / 3600.0
    hours = [figures[key] / 3600.0 for key in ("average_jct_s", "p99_jct_s", "makespan_s")]
    return (
        f"{name:30} {policy:14} average {hours[0]:8.3f} h  p99 {hours[1]:8.2f} h  "
        f"makespan {hours[2]:8.2f} h  wide waits {longest_h:7.2f} h at most  "
        f"{run.num_preemptions:6} preemptions  {run.cpu_seconds:6.1f} s CPU"
    )


def main() -> None:
    """Print a row per trace and policy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path, nargs="?", default=DATA)
    parser.add_argument("--policy", default="las,fifo")
    parser.add_argument("--only", default="", help="traces whose names hold this")
    parser.add_argument("--restart", type=float, default=0.0, help="seconds that a start costs")
    options = parser.parse_args()
    for name, work, devices, measured in cases(options.data):
        if options.only not in name:
            continue
        for policy in options.policy.split(","):
            mechanism = "gavel" if policy.startswith("gavel-") else "improved"
            rules = Rules(policy=policy.removeprefix("gavel-"), mechanism=mechanism)
            rules = replace(rules, restart_s=options.restart)
            run = simulate(work, devices, rules, measured=measured)
            print(_row(name, policy, work, run), flush=True)


if __name__ == "__main__":
    main()
