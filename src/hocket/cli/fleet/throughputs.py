"""``hocket fleet throughputs``: how fast models would train on kinds of devices, without them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.base.errors import UsageError
from hocket.cli.output import console, emit, json_option, say, working
from hocket.cli.sources import ModelOptions, announce_compilation, load_graph, model_options

if TYPE_CHECKING:
    from hocket.cost.calibrate import Calibration
    from hocket.fleet.throughputs.planned import GangPlan
    from hocket.fleet.throughputs.predict import PredictedThroughputs
    from hocket.fleet.throughputs.servers import Servers
    from hocket.graph.graph import Graph

_MAX_GANG = 4096


@click.command("throughputs")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option(
    "--on",
    "kinds",
    required=True,
    metavar="KIND,...",
    help="Kinds of devices, such as v100,p100,k80; NAME=HARDWARE for a kind that the fleet calls "
    "NAME, such as v100=dgx1-v100.",
)
@click.option(
    "--gang",
    "gangs",
    default="1",
    show_default=True,
    metavar="N,...",
    help="Numbers of devices that train one model together.",
)
@click.option(
    "--network",
    metavar="BANDWIDTH",
    help="What each network adapter of a server does, such as 10Gbit/s. [default: that of the "
    "machine's file, else 100Gbit/s]",
)
@click.option(
    "--measured",
    metavar="KIND=STEPS,...",
    help="Steps per second that one device was measured to do; its gangs follow from them.",
)
@click.option("--name", "job_type", help="What the table calls the model. [default: its name]")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Efficiencies that were measured, of hocket calibrate.",
)
@click.option(
    "--planned",
    is_flag=True,
    help="Plan every gang for itself: members share one batch of the model in the best way for "
    "their kind, as hocket plan finds it, instead of taking a batch each.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Table to write, as JSON.")
@model_options
@json_option
def command(
    models: tuple[str, ...],
    kinds: str,
    gangs: str,
    network: str | None,
    measured: str | None,
    job_type: str | None,
    calibration: Path | None,
    planned: bool,
    output: Path | None,
    options: ModelOptions,
    as_json: bool,
) -> None:
    """Predict steps per second of models on kinds of devices, for one device and for gangs.

    MODEL is a model of the zoo, package.module:function or a graph file. Members of a gang train
    data parallel on a batch each, and the steps of all of them count. Columns that end in
    _unconsolidated are gangs whose members are on different servers. 0: not enough memory.
    """
    from hocket.api.fleet_throughputs import (
        predict,
        stacked,
        throughputs_to_dict,
        write_throughputs,
    )
    from hocket.cost.calibrate import read_calibration
    from hocket.view.fleet_data import prediction_data

    if job_type is not None and len(models) > 1:
        raise UsageError("--name names one model", hint="name models one at a time")
    if measured is not None and len(models) > 1:
        raise UsageError("--measured is about one model", hint="take models one at a time")
    servers, sizes = _servers(kinds, _bandwidth_bps(network)), _gangs(gangs)
    speeds = _measured(measured)
    fitted = None if calibration is None else read_calibration(calibration)
    graphs = [load_graph(model, options)[0] for model in models]
    announce_compilation()
    if planned:
        if measured is not None:
            raise UsageError("--measured is of one fixed way", hint="leave out --planned")
        _plan(graphs, servers, sizes, fitted, job_type, output, as_json)
        return
    predictions = [
        predict(graph, servers, sizes, job_type=job_type, calibration=fitted, measured=speeds)
        for graph in graphs
    ]
    table = stacked([prediction.throughputs for prediction in predictions])
    if output is not None:
        write_throughputs(output, table)
    if as_json:
        emit(
            {
                "throughputs": throughputs_to_dict(table),
                "models": [prediction_data(prediction) for prediction in predictions],
            }
        )
        return
    for prediction in predictions:
        _print(prediction)
    if output is not None:
        say(f"wrote {output} — next: hocket fleet simulate TRACE --throughputs {output}")


def _plan(
    graphs: list[Graph],
    servers: list[Servers],
    sizes: list[int],
    calibration: Calibration | None,
    job_type: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Every gang with the best plan of its own."""
    from hocket.api.fleet_throughputs import (
        plan_gangs,
        planned_throughputs,
        stacked,
        throughputs_to_dict,
        write_throughputs,
    )
    from hocket.view.fleet_data import gang_plans_data

    models = []
    with working("planning every gang"):
        for graph in graphs:
            models.append(plan_gangs(graph, servers, sizes, calibration=calibration))
    names = [job_type or graph.name for graph in graphs]
    tables = [planned_throughputs(plans, n) for plans, n in zip(models, names, strict=True)]
    table = stacked(tables)
    if output is not None:
        write_throughputs(output, table)
    if as_json:
        plans_by_name = {n: gang_plans_data(plans) for plans, n in zip(models, names, strict=True)}
        emit({"throughputs": throughputs_to_dict(table), "plans": plans_by_name})
        return
    for plans, name in zip(models, names, strict=True):
        _print_plans(name, plans)
    if output is not None:
        say(f"wrote {output} — next: hocket fleet simulate TRACE --throughputs {output}")


def _print_plans(name: str, plans: list[GangPlan]) -> None:
    from rich.text import Text

    from hocket.view.fleet_data import gang_plans_data
    from hocket.view.names import LONGEST_SENTENCE, inert
    from hocket.view.table import Column, FittedTable

    columns = (
        Column(title="kind", is_name=True),
        Column(title="gang", align="right"),
        Column(title="steps/s", align="right"),
        Column(title="by", is_name=True),
    )
    rows = [
        [
            Text(inert(str(row["kind"]), 60)),
            Text(str(row["gang"])),
            Text(f"{row['steps_per_s']:.4g}" if row["steps_per_s"] else "–"),
            Text(inert(str(row["how"] or row["why"]), LONGEST_SENTENCE)),
        ]
        for row in gang_plans_data(plans)
    ]
    out = console()
    out.print(Text(f"{inert(name, 200)}: steps of the whole batch per second"))
    out.print(FittedTable(columns=columns, rows=rows))


def _bandwidth_bps(text: str | None) -> float | None:
    from hocket.base.units import parse_bandwidth

    if text is None:
        return None
    try:
        bandwidth_bps = parse_bandwidth(text)
    except ValueError as error:
        raise UsageError(str(error), where="--network") from error
    if not 0.0 < bandwidth_bps < float("inf"):
        raise UsageError(f"{text!r} is no bandwidth of a network", where="--network")
    return bandwidth_bps


def _measured(text: str | None) -> dict[str, float]:
    speeds: dict[str, float] = {}
    for part in text.split(",") if text is not None else ():
        kind, _, speed = (word.strip() for word in part.partition("="))
        try:
            steps_per_s = float(speed)
        except ValueError:
            steps_per_s = 0.0
        if not 0.0 < steps_per_s < float("inf") or kind in speeds:
            hint = "write each kind once, like v100=7.8,p100=4.9"
            raise UsageError(f"cannot read {part.strip()!r} in --measured", hint=hint)
        speeds[kind] = steps_per_s
    return speeds


def _servers(text: str, network_bps: float | None) -> list[Servers]:
    from hocket.api.fleet_throughputs import find_servers

    found = [find_servers(part, network_bps) for part in text.split(",")]
    names = [servers.name for servers in found]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        hint = "write NAME=HARDWARE with a NAME for each"
        raise UsageError(f"{repeated!r} stands twice in --on", hint=hint)
    return found


def _gangs(text: str) -> list[int]:
    from hocket.base.units import whole_number

    sizes = []
    for part in text.split(","):
        word = part.strip()
        size = whole_number(word, _MAX_GANG)
        if not size:
            hint = f"write numbers from 1 to {_MAX_GANG}, such as 1,2,4,8"
            raise UsageError(f"cannot read {word[:60]!r} in --gang", hint=hint)
        sizes.append(size)
    return sizes


def _print(prediction: PredictedThroughputs) -> None:
    from rich.text import Text

    from hocket.base.units import format_bytes
    from hocket.view.names import inert
    from hocket.view.table import Column, FittedTable

    table = prediction.throughputs
    columns = (
        Column(title="kind", is_name=True),
        Column(title="taken as", is_name=True),
        *(Column(title=f"gang of {profile.gang}", align="right") for profile in table.profiles),
    )
    hardware = [step.servers.hardware for step in prediction.steps]
    rows = [
        [
            Text(inert(kind, 60)),
            Text(inert(hardware[at % len(hardware)], 60)),
            *(Text(f"{speed:.4g}" if speed > 0.0 else "–") for speed in table.alone[:, at]),
        ]
        for at, kind in enumerate(table.kinds)
    ]
    out = console()
    name = inert(table.profiles[0].job_type, 200)
    out.print(Text(f"{name}: steps per second, {format_bytes(prediction.gradient_bytes)} summed"))
    out.print(FittedTable(columns=columns, rows=rows))
    for step in prediction.steps:
        if step.obstacle:
            out.print(Text(f"  {inert(step.servers.name, 60)}: {inert(step.obstacle, 200)}"))
