"""Simulated fleets as a table on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from hocket.fleet.simulator.fleet_run import FleetRun
from hocket.view.names import inert
from hocket.view.table import Column, FittedTable

if TYPE_CHECKING:
    from rich.console import Console

TIMES = ("policy", "average", "median", "p99", "makespan")
USE = ("policy", "used", "fair", "of share", "cost", "preemptions")


def label(run: FleetRun) -> str:
    """What a run is called in tables."""
    name = run.policy + (" +sharing" if run.shares_devices else "")
    return inert(name + (" (gavel)" if run.mechanism == "gavel" else ""), 60)


def times(run: FleetRun) -> list[str]:
    """The row of a run, in the order of `TIMES`."""
    figures = run.figures()
    keys = ("average_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s")
    return [label(run), *(hours(figures[key]) for key in keys)]


def use(run: FleetRun) -> list[str]:
    """The row of a run, in the order of `USE`."""
    figures = run.figures()
    return [
        label(run),
        f"{figures['utilisation']:.1%}",
        f"{figures['fairness']:.3f}",
        f"{figures['share_received_over_target']:.0%}",
        f"{figures['cost']:.6g}",
        f"{figures['num_preemptions']:,}",
    ]


def hours(seconds: float) -> str:
    """A time in hours."""
    return "–" if seconds != seconds else f"{seconds / 3600.0:.2f} h"


def print_runs(out: Console, runs: Sequence[FleetRun]) -> None:
    """One row per run in two tables, and what the runs have in common."""
    for headings, cells in ((TIMES, times), (USE, use)):
        columns = [Column(title=headings[0])]
        columns += [Column(title=heading, align="right") for heading in headings[1:]]
        rows = [[Text(cell) for cell in cells(run)] for run in runs]
        out.print(FittedTable(columns=tuple(columns), rows=rows))
    for line in remarks(runs):
        out.print(Text(f"  {line}"))


def remarks(runs: Sequence[FleetRun]) -> list[str]:
    """What one should know beside the figures."""
    first = runs[0]
    pools = zip(first.kinds, first.num_devices, strict=True)
    devices = ", ".join(f"{count} {inert(kind, 24)}" for kind, count in pools)
    lines = [f"{len(first.jct_s)} jobs measured on {devices}"]
    if len(first.left_out):
        lines.append(f"{len(first.left_out)} jobs left out: they need more devices than there are")
    unfinished = max(run.figures()["num_unfinished"] for run in runs)
    if unfinished:
        lines.append(f"{unfinished} jobs ended without finishing")
    cpu = ", ".join(f"{run.policy} {run.cpu_seconds:.1f} s" for run in runs)
    return [*lines, f"simulated in CPU time: {cpu}"]
