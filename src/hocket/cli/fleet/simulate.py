"""``hocket fleet simulate``: what a trace of jobs would see on a cluster under some policies."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hocket.base.errors import UsageError
from hocket.cli.numbers import FiniteRange
from hocket.cli.output import console, emit, json_option, say
from hocket.cli.sources import announce_compilation

if TYPE_CHECKING:
    from hocket.fleet.rounds.state import FleetDevice
    from hocket.fleet.simulator import FleetRun, TraceWork
    from hocket.fleet.simulator.simulate import OnProgress
    from hocket.fleet.throughputs import Throughputs
    from hocket.fleet.traces import Trace

NUM_KERNELS = 15
"""That rounds and a policy take, about; a fresh installation compiles them."""
_MAX_DEVICES = 1_000_000
_MAX_KINDS = 1000
_TABLES = ("throughputs.json", "simulation_throughputs.json", "tacc_throughputs.json")
"""Tables that are looked for beside a trace, and in the folder ``gavel`` beside its folder."""


@click.command("simulate")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--cluster",
    required=True,
    metavar="KIND:COUNT,...",
    help="Devices by kind, fastest first, such as v100:36,p100:36,k80:36; KIND:COUNTxSIZE for "
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
    help="Steps per second of kinds of jobs, in Gavel's JSON. [default: a table beside the trace]",
)
@click.option("--jobs", metavar="A:B", help="Measure jobs A to B-1 only, and end with the last.")
@click.option(
    "--preemption-cost",
    type=FiniteRange(min=0.0),
    default=0.0,
    metavar="SECONDS",
    help="Time from the start of a job to its first step. [default: 0]",
)
@click.option(
    "--min-run",
    type=FiniteRange(min=0.0),
    default=0.0,
    metavar="SECONDS",
    help="A started job keeps its devices at least so long. [default: 0]",
)
@click.option(
    "--round",
    "round_s",
    type=FiniteRange(min=1.0),
    default=360.0,
    show_default=True,
    metavar="SECONDS",
    help="Length of a round.",
)
@click.option(
    "--solve-every",
    type=FiniteRange(min=0.0),
    default=0.0,
    metavar="SECONDS",
    help="Least time between two allocations. [default: 0, one at every change]",
)
@click.option(
    "--prices", metavar="KIND=PRICE,...", help="Price per hour of one device. [default: 1 each]"
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
    help="Of random arrivals and orders. [default: 0]",
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
    min_run: float,
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
    from hocket.api.fleet import (
        Rules,
        bind,
        elastic_speeds,
        find_policy,
        read_trace,
        refuse_unlike_gavel,
        simulate,
    )

    for name in policies:
        find_policy(name)
        if compatible == "gavel":
            refuse_unlike_gavel(name)
    kinds, devices = parse_cluster(cluster)
    work_trace = _with_arrivals(read_trace(trace), arrivals_per_hour, seed)
    table = _table(throughputs, trace)
    work = bind(work_trace, kinds, table)
    for note in (*work.notes, *_never_fits(work, devices)):
        say(note)
    if elastic and (table is None or space_sharing):
        raise UsageError(
            "elastic gangs need a table of throughputs, and devices of their own",
            hint="give --throughputs, and leave out --space-sharing",
        )
    speeds = elastic_speeds(work, table) if elastic and table is not None else None
    measured = _range(jobs, len(work_trace))
    announce_compilation(about=NUM_KERNELS)
    runs = []
    for name in policies:
        rules = Rules(
            policy=name,
            mechanism=compatible or "improved",
            round_s=round_s,
            min_run_s=min_run,
            min_solve_s=solve_every,
            restart_s=preemption_cost,
            seed=seed,
        )
        for gangs in (None, speeds) if elastic else (None,):
            title = name if gangs is None else f"{name}, elastic gangs"
            with _progress(title) as on_progress:
                run = simulate(
                    work,
                    devices,
                    rules,
                    shares_devices=space_sharing,
                    price_per_hour=_prices(prices, kinds),
                    measured=measured,
                    elastic=gangs,
                    records_spans=html is not None,
                    on_progress=on_progress,
                )
            runs.append(replace(run, policy=title))
    if html is not None:
        from hocket.view.fleet_report import write_fleet_report

        write_fleet_report(html, runs, trace.name)
        say(f"wrote {html}")
    _show(runs, as_json)


def _never_fits(work: TraceWork, devices: tuple[FleetDevice, ...]) -> tuple[str, ...]:
    """Jobs that no kind of the cluster can ever run, in words."""
    import numpy as np

    num_devices = Counter(device.kind for device in devices)
    largest = np.array([num_devices[kind] for kind in work.kinds])
    fits = (work.steps_per_s > 0.0) & (work.trace.gang[:, None] <= largest)
    never = np.flatnonzero(~fits.any(axis=1))
    if not len(never):
        return ()
    names = ", ".join(repr(work.trace.names[job]) for job in never[:5])
    more = ", …" if len(never) > 5 else ""
    return (
        f"{len(never)} of {len(work.trace)} jobs are left out ({names}{more}): no kind of the "
        "cluster has enough devices that they can run on",
    )


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


def _range(text: str | None, num_jobs: int) -> tuple[int, int] | None:
    from hocket.base.units import whole_number

    if text is None:
        return None
    first, end = (whole_number(part, num_jobs) for part in text.partition(":")[::2])
    if first is None or end is None or first >= end:
        hint = f"write A:B with 0 <= A < B <= {num_jobs}, such as 4000:5000"
        raise UsageError(f"cannot take jobs {text[:60]!r} of this trace", hint=hint)
    return first, end


def _prices(text: str | None, kinds: tuple[str, ...]) -> Any:
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


def _table(path: Path | None, trace: Path) -> Throughputs | None:
    from hocket.api.fleet import read_throughputs

    if path is not None:
        return read_throughputs(path)
    folders = (trace.parent, trace.parent.parent / "gavel", trace.parent.parent)
    for candidate in (folder / name for folder in folders for name in _TABLES):
        if candidate.is_file():
            say(f"throughputs from {candidate}")
            return read_throughputs(candidate)
    return None


def _with_arrivals(trace: Trace, jobs_per_hour: float | None, seed: int) -> Trace:
    if jobs_per_hour is None:
        return trace
    from dataclasses import replace

    import numpy as np

    gaps_s = np.random.default_rng(seed).exponential(3600.0 / jobs_per_hour, len(trace))
    return replace(trace, arrival_s=np.cumsum(gaps_s) - gaps_s[0])


@contextmanager
def _progress(policy: str) -> Iterator[OnProgress | None]:
    """A bar on stderr where somebody looks at it."""
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
