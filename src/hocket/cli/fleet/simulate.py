"""``hocket fleet simulate``: replay a trace of jobs on a simulated cluster under some policies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from hocket.base.errors import UsageError
from hocket.cli.declare import argument, declare, option
from hocket.cli.fleet.given import (
    Round,
    find_throughputs,
    job_range,
    parse_cluster,
    prices_of,
    with_arrivals,
)
from hocket.cli.options import FiniteRange
from hocket.cli.output import console, emit, say
from hocket.cli.sources import announce_compilation

if TYPE_CHECKING:
    from hocket.fleet.gangs import GangSpeeds
    from hocket.fleet.rounds.state import Rules
    from hocket.fleet.simulator import FleetRun
    from hocket.fleet.simulator.simulate import OnProgress

NUM_KERNELS = 15
"""Approximate number of kernels that rounds and a policy compile in a fresh installation."""


@dataclass(frozen=True, kw_only=True)
class SimulationRequest:
    """Options that define a simulation: trace of jobs, cluster, policies and rules of rounds."""

    trace: Annotated[Path, argument()]
    cluster: Annotated[
        str,
        option(
            "Devices by type, fastest first, such as v100:36,p100:36,k80:36; TYPE:COUNTxSIZE for "
            "servers of SIZE devices.",
            metavar="TYPE:COUNT,...",
        ),
    ]
    policies: Annotated[
        tuple[str, ...], option("Scheduling policy; give several to compare them.", "--policy")
    ] = ("las",)
    space_sharing: Annotated[bool, "Let two jobs share a device where it pays."] = False
    elastic: Annotated[
        bool,
        "Also let jobs take any number of devices that the table has for them, as is best "
        "while "
        "others come and go, and compare that with the trace's own numbers.",
    ] = False
    compatible: Annotated[
        Literal["gavel"] | None,
        "Turn shares into rounds as Gavel does, to compare with its results.",
    ] = None
    throughputs: Annotated[
        Path | None,
        "Steps per second of job types, in Gavel's JSON. [default: a table beside the trace]",
    ] = None
    jobs: Annotated[
        str | None, option("Measure jobs A to B-1 only, and end with the last.", metavar="A:B")
    ] = None
    preemption_cost: Annotated[
        float,
        option(
            "Time from the start of a job to its first step.",
            type=FiniteRange(min=0.0),
            metavar="SECONDS",
        ),
    ] = 0.0
    round_s: Round = 360.0
    solve_every: Annotated[
        float,
        option(
            "Least time between two allocations. [default: 0, one at every change]",
            type=FiniteRange(min=0.0),
            metavar="SECONDS",
        ),
    ] = 0.0
    prices: Annotated[
        str | None,
        option("Price per hour of one device. [default: 1 each]", metavar="TYPE=PRICE,..."),
    ] = None
    arrivals_per_hour: Annotated[
        float | None,
        option(
            "Draw arrivals anew at this rate, for traces that have none.",
            type=FiniteRange(min=0.0, min_open=True),
        ),
    ] = None
    seed: Annotated[
        int, option("Seed of random arrivals and orders.", type=click.IntRange(min=0))
    ] = 0


@declare("simulate")
def command(
    *,
    request: SimulationRequest,
    html: Annotated[Path | None, "Write a report to this file."] = None,
    as_json: bool,
) -> None:
    """Simulate the jobs of TRACE on a cluster that need not exist, under one or more policies.

    TRACE is of Gavel, Shockwave, Tiresias, Philly or Pollux, or a CSV with the columns name,
    job_type, arrival_s, gang, weight, total_steps, duration_s, slo_s.
    """
    from hocket.fleet.policies import find_policy
    from hocket.fleet.rounds.gavel import refuse_non_gavel
    from hocket.fleet.rounds.state import Rules
    from hocket.fleet.simulator import bind, elastic_speeds, simulate
    from hocket.fleet.traces import read_trace

    for name in request.policies:
        find_policy(name)
    device_types, devices = parse_cluster(request.cluster)
    work_trace = with_arrivals(read_trace(request.trace), request.arrivals_per_hour, request.seed)
    for name in request.policies if request.compatible == "gavel" else ():
        refuse_non_gavel(name, has_gangs=bool((work_trace.gang > 1).any()))
    table = find_throughputs(request.throughputs, request.trace)
    work = bind(work_trace, device_types, table)
    for note in work.notes:
        say(note)
    if request.elastic and (table is None or request.space_sharing):
        raise UsageError(
            "elastic gangs need a table of throughputs, and devices of their own",
            hint="give --throughputs, and leave out --space-sharing",
        )
    rules = Rules(
        policy=request.policies[0],
        mechanism=request.compatible or "improved",
        round_s=request.round_s,
        min_solve_s=request.solve_every,
        restart_s=request.preemption_cost,
        seed=request.seed,
    )
    run = partial(
        simulate,
        work,
        devices,
        shares_devices=request.space_sharing,
        price_per_hour=prices_of(request.prices, device_types),
        measured=job_range(request.jobs, len(work_trace)),
        records_spans=html is not None,
    )
    announce_compilation(about=NUM_KERNELS)
    gangs: list[list[GangSpeeds] | None] = [None]
    if request.elastic and table is not None:
        gangs.append(elastic_speeds(work, table))
    runs = [
        _watched(run, replace(rules, policy=name), speeds)
        for name in request.policies
        for speeds in gangs
    ]
    if html is not None:
        from hocket.view.fleet_report import write_fleet_report

        write_fleet_report(html, runs, request.trace.name)
        say(f"wrote {html}")
    _show(runs, as_json)


def _watched(
    run: Callable[..., FleetRun], rules: Rules, speeds: list[GangSpeeds] | None
) -> FleetRun:
    """Run one simulation with a progress bar, under the title that tables show."""
    title = rules.policy if speeds is None else f"{rules.policy}, elastic gangs"
    with _progress(title) as on_progress:
        return replace(run(rules, elastic=speeds, on_progress=on_progress), policy=title)


@contextmanager
def _progress(policy: str) -> Iterator[OnProgress | None]:
    """Show a progress bar on stderr if stderr is a terminal; yield its callback, or None."""
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
