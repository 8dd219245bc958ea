"""Format simulated fleets as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from hocket.fleet.simulator.fleet_run import FleetRun
from hocket.view.names import inert
from hocket.view.table import Column, FittedTable, number

if TYPE_CHECKING:
    from rich.console import Console

TIMES = ("average", "median", "p99", "makespan")
USE = ("used", "fair", "of share", "cost", "preemptions")


def label(run: FleetRun) -> str:
    """Name of a run in tables."""
    name = run.policy + (" +sharing" if run.shares_devices else "")
    return inert(name + (" (gavel)" if run.mechanism == "gavel" else ""), 60)


def unit_of(seconds: float) -> tuple[float, str]:
    """Unit in which a duration reads best: its length in seconds and its name."""
    return next(((s, unit) for s, unit in ((3600.0, "h"), (60.0, "min")) if seconds >= s), (1, "s"))


def run_tables(runs: Sequence[FleetRun]) -> tuple[FittedTable, FittedTable]:
    """Two tables with a row per run: times in one common unit, and use of the devices."""
    every = [run.figures() for run in runs]
    unit = unit_of(max((figures["average_jct_s"] for figures in every), default=np.nan))
    keys = ("average_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s")
    times = [[_in_unit(figures[key], *unit) for key in keys] for figures in every]
    use = [
        [
            f"{figures['utilisation']:.1%}",
            f"{figures['fairness']:.3f}",
            f"{figures['share_received_over_target']:.0%}",
            f"{figures['cost']:.6g}",
            f"{figures['num_preemptions']:,}",
        ]
        for figures in every
    ]
    tables = ((TIMES, times), (USE, use))
    first, second = (
        FittedTable(
            columns=(Column(title="policy"), *map(number, titles)),
            rows=[[label(run), *cells] for run, cells in zip(runs, rows, strict=True)],
        )
        for titles, rows in tables
    )
    return first, second


def _in_unit(seconds: float, unit_s: float, unit: str) -> str:
    # NaN is the only value that differs from itself: no job has such a time.
    return "–" if seconds != seconds else f"{seconds / unit_s:.2f} {unit}"


def print_runs(out: Console, runs: Sequence[FleetRun]) -> None:
    """Print the tables of all runs and the remarks about them."""
    for table in run_tables(runs):
        out.print(table)
    for line in remarks(runs):
        out.print(Text(f"  {line}"))


def remarks(runs: Sequence[FleetRun]) -> list[str]:
    """Notes that belong to the figures: devices, omitted and unfinished jobs, costs, CPU time."""
    first = runs[0]
    pools = zip(first.device_types, first.num_devices, strict=True)
    devices = ", ".join(f"{count} {inert(device_type, 24)}" for device_type, count in pools)
    lines = [f"{_jobs(len(first.jct_s))} measured on {devices}"]
    if len(first.left_out):
        names = ", ".join(repr(inert(first.names[job], 40)) for job in first.left_out[:5])
        more = ", …" if len(first.left_out) > 5 else ""
        lines.append(
            f"{_jobs(len(first.left_out))} left out ({names}{more}): no device type has the "
            "devices for them"
        )
    unfinished = max(run.figures()["num_unfinished"] for run in runs)
    if unfinished:
        lines.append(f"{_jobs(unfinished)} ended without finishing")
    lines.append("cost: busy hours of devices at their --prices (1 where none is given)")
    cpu = ", ".join(f"{run.policy} {run.cpu_seconds:.1f} s" for run in runs)
    return [*lines, f"simulated in CPU time: {cpu}"]


def _jobs(count: int) -> str:
    return f"{count:,} job{'' if count == 1 else 's'}"
