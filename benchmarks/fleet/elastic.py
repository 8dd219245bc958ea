"""Jobs with a plan for every number of devices, beside the same jobs with the trace's own numbers.

    python benchmarks/fleet/elastic.py [DATA] [--only NAME]

Gavel's traces run on its physical cluster (8 V100, 16 P100, 24 K80) and on its simulated one (36 of
each), with the throughputs that it measured for gangs of 1, 2, 4 and 8. Pollux's workloads run on
16 servers of four T4, with the step times that it measured: a job keeps its global batch, so fewer
devices take larger parts of it, one after another where they do not fit. A stop costs 60 s. Prints
average completion times, how much sooner jobs end, and what no choice of sizes can beat: each job
alone on the fleet with the gang that is quickest.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np
from gavel_cluster import DATA, DEVICE_TYPES, TABLE

from hocket.fleet.rounds import FleetDevice, Rules
from hocket.fleet.simulator import bind, elastic_speeds, simulate
from hocket.fleet.throughputs import JobProfile, Throughputs, read_throughputs
from hocket.fleet.traces import Trace, read_trace

PHYSICAL = {"v100": 8, "p100": 16, "k80": 24}
SIMULATED = dict.fromkeys(DEVICE_TYPES, 36)
T4 = {"t4": 64}
RULES = Rules(restart_s=60.0)
GAVEL = {
    "physical": ("gavel/traces_physical_cluster/max_min_fairness.trace", 96, PHYSICAL),
    "makespan": ("gavel/traces_physical_cluster/minimize_makespan.trace", 100, PHYSICAL),
    "msr 0e4a51": ("gavel/traces_msr_seed0/0e4a51.trace", 300, SIMULATED),
    "msr 6214e9": ("gavel/traces_msr_seed0/6214e9.trace", 300, SIMULATED),
}
POLLUX = tuple(f"workload-{number}" for number in range(1, 5))
SERVERS = {1: "1", 2: "2", 3: "3", 4: "4", 8: "44", 12: "444", 16: "4444"}
"""Devices per server of each gang, as Pollux writes placements."""
MANY_SERVERS = {24: "6", 32: "8", 48: "12", 64: "16"}
"""Servers of larger gangs, which Pollux timed apart from small ones."""


def main() -> None:
    """Run all, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, nargs="?", default=DATA)
    parser.add_argument("--only")
    options = parser.parse_args()
    gains = []
    for name, (path, count, fleet) in GAVEL.items():
        if options.only in (None, name):
            trace = read_trace(options.data / path).first(count)
            gains.append(_compare(name, trace, read_throughputs(options.data / TABLE), fleet))
    for name in POLLUX:
        if options.only in (None, name):
            trace = read_trace(options.data / "pollux" / "workloads" / f"{name}.csv")
            table = pollux_table(options.data / "pollux", name, trace)
            gains.append(_compare(name, trace, table, T4))
    print(f"all: {1 - float(np.exp(np.mean(np.log1p([-gain for gain in gains])))):.0%} sooner")


def _compare(name: str, trace: Trace, table: Throughputs, fleet: dict[str, int]) -> float:
    work = bind(trace, tuple(fleet), table)
    devices = tuple(
        FleetDevice(name=f"{device_type}-{at}", device_type=device_type)
        for device_type, n in fleet.items()
        for at in range(n)
    )
    found = []
    for speeds in (None, elastic_speeds(work, table)):
        figures = simulate(work, devices, RULES, elastic=speeds).figures()
        found.append(figures["average_jct_s"] / 3600.0)
    gain, count = 1.0 - found[1] / found[0], np.array(list(fleet.values()))
    least_s = [
        steps / speeds.on(count).max()
        for steps, speeds in zip(work.total_steps, elastic_speeds(work, table), strict=True)
    ]
    print(
        f"{name}: {len(trace)} jobs, {found[0]:.2f} h with fixed gangs, {found[1]:.2f} h with "
        f"elastic ones: {gain:.0%} sooner; {np.mean(least_s) / 3600:.2f} h if each were alone",
        flush=True,
    )
    return gain


def pollux_table(folder: Path, name: str, trace: Trace) -> Throughputs:
    """Steps of a job's global batch per second on some T4, from the measured parts of a batch."""
    with (folder / "workloads" / f"{name}.csv").open() as file:
        batches = {row["application"]: int(row["batch_size"]) for row in csv.DictReader(file)}
    gangs = sorted({*SERVERS, *MANY_SERVERS, *trace.gang.tolist()})
    profiles, speeds = [], []
    for job_type in dict.fromkeys(trace.job_types):
        measured = _measured(folder / "traces" / job_type)
        known = {gang: _step_s(measured[text, gang], batches[job_type] / gang)
                 for gang, text in (SERVERS | MANY_SERVERS).items()}  # fmt: skip
        for gang in gangs:
            step_s = float(np.exp(np.interp(
                np.log(gang), np.log(list(known)), np.log(list(known.values()))
            )))  # fmt: skip
            profiles.append(JobProfile(job_type, gang))
            speeds.append([1.0 / step_s])
    count = len(profiles)
    return Throughputs(
        device_types=("t4",), profiles=tuple(profiles), alone=np.array(speeds),
        beside=np.zeros((count, count, 1)),
    )  # fmt: skip


def _measured(folder: Path) -> dict[tuple[str, int], list[tuple[int, float, float]]]:
    """By servers and gang: samples on each device, seconds of a step, and of its exchange."""
    found: dict[tuple[str, int], list[tuple[int, float, float]]] = {}
    for name in ("placements.csv", "scalability.csv"):
        with (folder / name).open() as file:
            for row in csv.DictReader(file):
                entry = int(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"])
                where = row.get("placement") or row["num_nodes"]
                gang = int(row.get("num_replicas") or sum(map(int, where)))
                found.setdefault((where, gang), []).append(entry)
    return {where: sorted(rows) for where, rows in found.items()}


def _step_s(rows: list[tuple[int, float, float]], samples: float) -> float:
    """Seconds of a step with so many samples on each device; what does not fit goes in parts."""
    sizes, step_s, sync_s = (np.array(column) for column in zip(*rows, strict=True))
    parts = max(1, int(np.ceil(samples / sizes[-1])))
    each = samples / parts
    whole = float(np.interp(each, sizes, step_s))
    exchange = float(np.interp(each, sizes, sync_s))
    return parts * (whole - exchange) + exchange


if __name__ == "__main__":
    main()
