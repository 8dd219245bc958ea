"""``hocket fleet simulate``: what a trace of jobs would see on a cluster under some policies."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.base.errors import UsageError
from hocket.cli.fleet.given import (
    find_throughputs,
    job_range,
    parse_cluster,
    prices_of,
    round_option,
    with_arrivals,
)
from hocket.cli.numbers import FiniteRange
from hocket.cli.output import console, emit, json_option, say
from hocket.cli.sources import announce_compilation

if TYPE_CHECKING:
    from hocket.fleet.gangs import GangSpeeds
    from hocket.fleet.rounds.state import FleetDevice, Rules
    from hocket.fleet.simulator import FleetRun, TraceWork
    from hocket.fleet.simulator.simulate import OnProgress

NUM_KERNELS = 15
"""That rounds and a policy take, about; a fresh installation compiles them."""


@click.command("simulate")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--cluster",
    required=True,
    metavar="TYPE:COUNT,...",
    help="Devices by type, fastest first, such as v100:36,p100:36,k80:36; TYPE:COUNTxSIZE for "
    "servers of SIZE devices.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("las",),
    show_default=True,
    help="How devices are shared; give several to compare them.",
)
@click.option("--space-sharing", is_flag=True, help="Let two jobs share a device where it pays.")
@click.option(
    "--elastic",
    is_flag=True,
    help="Also let jobs take any number of devices that the table has for them, as is best while "
    "others come and go, and compare that with the trace's own numbers.",
)
@click.option(
    "--compatible",
    type=click.Choice(["gavel"]),
    help="Turn shares into rounds as Gavel does, to compare with its results.",
)
@click.option(
    "--throughputs",
    type=click.Path(path_type=Path),
    help="Steps per second of job types, in Gavel's JSON. [default: a table beside the trace]",
)
@click.option("--jobs", metavar="A:B", help="Measure jobs A to B-1 only, and end with the last.")
@click.option(
    "--preemption-cost",
    type=FiniteRange(min=0.0),
    default=0.0,
    metavar="SECONDS",
    help="Time from the start of a job to its first step.",
)
@round_option
@click.option(
    "--solve-every",
    type=FiniteRange(min=0.0),
    default=0.0,
    metavar="SECONDS",
    help="Least time between two allocations. [default: 0, one at every change]",
)
@click.option(
    "--prices", metavar="TYPE=PRICE,...", help="Price per hour of one device. [default: 1 each]"
)
@click.option(
    "--arrivals-per-hour",
    type=FiniteRange(min=0.0, min_open=True),
    help="Draw arrivals anew at this rate, for traces that have none.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    help="Of random arrivals and orders.",
)
@click.option("--html", type=click.Path(path_type=Path), help="Write a report to this file.")
@json_option
def command(
    trace: Path,
    cluster: str,
    policies: tuple[str, ...],
    space_sharing: bool,
    elastic: bool,
    compatible: str | None,
    throughputs: Path | None,
    jobs: str | None,
    preemption_cost: float,
    round_s: float,
    solve_every: float,
    prices: str | None,
    arrivals_per_hour: float | None,
    seed: int,
    html: Path | None,
    as_json: bool,
) -> None:
    """Run the jobs of TRACE on a cluster that exists only here, under one or more policies.

    TRACE is of Gavel, Shockwave, Tiresias, Philly or Pollux, or a CSV with the columns
    name, job_type, arrival_s, gang, weight, total_steps, duration_s, slo_s.
    """
    from hocket.fleet.policies import find_policy
    from hocket.fleet.rounds.gavel import refuse_non_gavel
    from hocket.fleet.rounds.state import Rules
    from hocket.fleet.simulator import bind, elastic_speeds, simulate
    from hocket.fleet.traces import read_trace

    for name in policies:
        find_policy(name)
    device_types, devices = parse_cluster(cluster)
    work_trace = with_arrivals(read_trace(trace), arrivals_per_hour, seed)
    for name in policies if compatible == "gavel" else ():
        refuse_non_gavel(name, has_gangs=bool((work_trace.gang > 1).any()))
    table = find_throughputs(throughputs, trace)
    work = bind(work_trace, device_types, table)
    for note in (*work.notes, *_never_fits(work, devices)):
        say(note)
    if elastic and (table is None or space_sharing):
        raise UsageError(
            "elastic gangs need a table of throughputs, and devices of their own",
            hint="give --throughputs, and leave out --space-sharing",
        )
    rules = Rules(
        policy=policies[0],
        mechanism=compatible or "improved",
        round_s=round_s,
        min_solve_s=solve_every,
        restart_s=preemption_cost,
        seed=seed,
    )
    run = partial(
        simulate,
        work,
        devices,
        shares_devices=space_sharing,
        price_per_hour=prices_of(prices, device_types),
        measured=job_range(jobs, len(work_trace)),
        records_spans=html is not None,
    )
    announce_compilation(about=NUM_KERNELS)
    gangs: list[list[GangSpeeds] | None] = [None]
    if elastic and table is not None:
        gangs.append(elastic_speeds(work, table))
    runs = [
        _watched(run, replace(rules, policy=name), speeds) for name in policies for speeds in gangs
    ]
    if html is not None:
        from hocket.view.fleet_report import write_fleet_report

        write_fleet_report(html, runs, trace.name)
        say(f"wrote {html}")
    _show(runs, as_json)


def _watched(
    run: Callable[..., FleetRun], rules: Rules, speeds: list[GangSpeeds] | None
) -> FleetRun:
    """Result of a simulation, which somebody may watch, under the title that tables show."""
    title = rules.policy if speeds is None else f"{rules.policy}, elastic gangs"
    with _progress(title) as on_progress:
        return replace(run(rules, elastic=speeds, on_progress=on_progress), policy=title)


def _never_fits(work: TraceWork, devices: tuple[FleetDevice, ...]) -> tuple[str, ...]:
    """Jobs that no device type of the cluster can ever run, in words."""
    import numpy as np

    num_devices = Counter(device.device_type for device in devices)
    largest = np.array([num_devices[device_type] for device_type in work.device_types])
    fits = (work.steps_per_s > 0.0) & (work.trace.gang[:, None] <= largest)
    never = np.flatnonzero(~fits.any(axis=1))
    if not len(never):
        return ()
    names = ", ".join(repr(work.trace.names[job]) for job in never[:5])
    more = ", …" if len(never) > 5 else ""
    return (
        f"{len(never)} of {len(work.trace)} jobs are left out ({names}{more}): no device type of "
        "the cluster has enough devices that they can run on",
    )


@contextmanager
def _progress(policy: str) -> Iterator[OnProgress | None]:
    """Show a progress bar on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import Progress

    with Progress(console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(policy, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _show(runs: list[FleetRun], as_json: bool) -> None:
    if as_json:
        from hocket.view.fleet_data import run_data

        figures = [run_data(run) for run in runs]
        emit(figures[0] if len(runs) == 1 else {"runs": figures})
        return
    from hocket.view.fleet_text import print_runs

    print_runs(console(), runs)
