"""Simulated fleets on the published workload, and on a large generated one.

    python benchmarks/fleet/simulate.py [DATA] [--only NAME]

DATA is a folder with Gavel's table (``gavel/simulation_throughputs.json``) and its workload
(``gavel_generated/``). Prints average completion times of jobs 4000 to 4999 on 36 V100, 36 P100 and
36 K80 beside Gavel's own, CPU time, and preemptions; then both mechanisms on generated workloads of
the same mix, and 100,000 jobs on 1,000 devices.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from gavel_cluster import DATA, DEVICE_TYPES, TABLE, devices_of_each_type

from hocket.fleet.rounds import FleetDevice, Rules
from hocket.fleet.simulator import TraceWork, bind, simulate
from hocket.fleet.throughputs import Throughputs, read_throughputs
from hocket.fleet.traces import generate_trace, read_trace

RUNS: dict[str, tuple[Rules, bool, str]] = {
    "gavel-aware": (Rules(mechanism="gavel"), False, "29.42 h, 277 s"),
    "gavel-agnostic": (
        Rules(mechanism="gavel", policy="las-agnostic"), False, "98.26 h, 979 s"
    ),
    "improved": (Rules(), False, ""),
    "improved-rare": (Rules(min_solve_s=1920.0), False, ""),
    "gavel-60s": (Rules(mechanism="gavel", restart_s=60.0), False, ""),
    "improved-60s": (Rules(restart_s=60.0), False, ""),
    "sharing": (Rules(min_solve_s=1920.0), True, "19.64 h published"),
}  # fmt: skip


def main() -> None:
    """Run all, or one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path, nargs="?", default=DATA)
    parser.add_argument("--only")
    options = parser.parse_args()
    table = read_throughputs(options.data / TABLE)
    folder = options.data / "gavel_generated"
    trace = read_trace(folder / "gavel_continuous_single_rate5.6_seed0.tsv")
    work = bind(trace, DEVICE_TYPES, table)
    fleet = devices_of_each_type(36)
    _warm_up(work, fleet)
    for name, (rules, shares, reference) in RUNS.items():
        if options.only in (None, name):
            run = simulate(work, fleet, rules, shares_devices=shares, measured=(4000, 5000))
            _report(name, run.figures(), reference)
    if options.only in (None, "noise"):
        noise = 1.0 + 1e-9 * np.random.default_rng(0).standard_normal(work.steps_per_s.shape)
        shaken = TraceWork(**{**work.__dict__, "steps_per_s": work.steps_per_s * noise})
        _report("noise", simulate(shaken, fleet, measured=(4000, 5000)).figures(), "")
    if options.only in (None, "generated"):
        _compare_mechanisms(table, fleet)
    if options.only in (None, "large"):
        large = generate_trace(table.on(DEVICE_TYPES), num_jobs=100_000, jobs_per_hour=50.0)
        run = simulate(
            bind(large, DEVICE_TYPES, table), devices_of_each_type(334), Rules(min_solve_s=1920.0)
        )
        _report("large", run.figures(), "120 s wanted")


def _compare_mechanisms(table: Throughputs, fleet: tuple[FleetDevice, ...]) -> None:
    """Both mechanisms on workloads that nobody published."""
    for jobs_per_hour in (4.0, 4.8, 5.6):
        for seed in (1, 2):
            trace = generate_trace(
                table.on(DEVICE_TYPES), num_jobs=4000, jobs_per_hour=jobs_per_hour, seed=seed
            )
            work = bind(trace, DEVICE_TYPES, table)
            for rules in (Rules(mechanism="gavel"), Rules()):
                run = simulate(work, fleet, rules, measured=(1000, 2000))
                name = f"{jobs_per_hour}/{seed} {rules.mechanism}"
                _report(name, run.figures(), "")


def _warm_up(work: TraceWork, fleet: tuple[FleetDevice, ...]) -> None:
    """Compiling is no part of the measured time."""
    for rules in (Rules(), Rules(mechanism="gavel")):
        simulate(work, fleet, rules, measured=(0, 2))


def _report(name: str, figures: dict[str, float], reference: str) -> None:
    hours = figures["average_jct_s"] / 3600.0
    print(
        f"{name:16} {hours:8.3f} h  used {figures['utilisation']:.3f}  "
        f"{figures['num_preemptions']:9,} preemptions  {figures['cpu_seconds']:7.1f} s CPU  "
        f"{reference}",
        flush=True,
    )


if __name__ == "__main__":
    main()
