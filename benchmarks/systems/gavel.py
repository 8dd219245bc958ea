"""Gavel's headline: average completion time at 5.6 jobs per hour, with and without device types.

Run: python benchmarks/systems/gavel.py [DATA]

Simulated: Gavel's own rounds and seeded workload (benchmarks/fleet/published.py), jobs 4000 to 4999
on 36 V100s, 36 P100s and 36 K80s. DATA is a folder with ``gavel/simulation_throughputs.json``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fleet"))
from gavel_cluster import DATA, DEVICE_TYPES, gavel_table
from published import FLEET, GAVEL, published_trace

from hocket.fleet.simulator import bind, simulate

RATE, NUM_JOBS, MEASURED = 5.6, 16_000, (4000, 5000)


def average_hours(policy: str, data: Path) -> float:
    """Average completion time of the measured jobs."""
    table = gavel_table(data)
    work = bind(published_trace(table, NUM_JOBS, RATE), DEVICE_TYPES, table)
    run = simulate(work, FLEET, replace(GAVEL, policy=policy), measured=MEASURED)
    return float(run.jct_s.mean()) / 3600.0


def ours(data: Path = DATA) -> str:
    """The figures of the row in docs/systems.md."""
    aware, agnostic = (average_hours(policy, data) for policy in ("las", "las-agnostic"))
    return f"simulated: {aware:.2f} h, {agnostic:.2f} h without device types"


if __name__ == "__main__":
    print(ours(*map(Path, sys.argv[1:])))
