"""``hocket fleet throughputs``: predict training speeds of models on device types that need not
exist.

Writes Gavel's throughput table, for data-parallel gangs or with a plan for every gang.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hocket.base.errors import UsageError
from hocket.cli.declare import argument, declare, option
from hocket.cli.fleet.given import parse_pairs
from hocket.cli.options import BANDWIDTH, ModelOptions
from hocket.cli.output import answer, say, working
from hocket.cli.sources import announce_compilation, load_graph

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hocket.fleet.throughputs.planned import GangPlan
    from hocket.fleet.throughputs.predict import PredictedThroughputs
    from hocket.fleet.throughputs.servers import Servers

_MAX_GANG = 4096


@declare("throughputs")
def command(
    *,
    models: Annotated[tuple[str, ...], argument("MODEL...", nargs=-1, required=True)],
    device_types: Annotated[
        str,
        option(
            "Device types, such as v100,p100,k80; NAME=HARDWARE for a type that the fleet calls "
            "NAME, such as v100=dgx1-v100.",
            "--on",
            metavar="TYPE,...",
        ),
    ],
    gangs: Annotated[
        str, option("Numbers of devices that train one model together.", "--gang", metavar="N,...")
    ] = "1",
    network_bps: Annotated[
        float | None,
        option(
            "Bandwidth of each network adapter of a server, such as 10Gbit/s. [default: that of "
            "the machine's file, else 100Gbit/s]",
            "--network",
            type=BANDWIDTH,
        ),
    ] = None,
    measured: Annotated[
        str | None,
        option(
            "Steps per second that one device was measured to do; its gangs follow from them.",
            metavar="TYPE=STEPS,...",
        ),
    ] = None,
    job_type: Annotated[
        str | None, option("What the table calls the model. [default: its name]", "--name")
    ] = None,
    calibration: Annotated[
        Path | None, "Efficiencies that were measured, of hocket calibrate."
    ] = None,
    planned: Annotated[
        bool,
        "Plan every gang for itself: members share one batch of the model in the best way for "
        "their device type, as hocket plan finds it, instead of taking a batch each.",
    ] = False,
    output: Annotated[Path | None, option("Table to write, as JSON.", "-o", "--output")] = None,
    options: ModelOptions,
    as_json: bool,
) -> None:
    """Predict steps per second of models on device types, for one device and for gangs.

    MODEL is a model of the zoo, package.module:function or a graph file. Members of a gang train
    data parallel on a batch each, and the steps of all of them count. Columns that end in
    _unconsolidated are gangs whose members are on different servers. 0: not enough memory.
    """
    from hocket.cost.calibrate import read_calibration
    from hocket.fleet.throughputs.planned import plan_gangs, planned_throughputs
    from hocket.fleet.throughputs.predict import predict
    from hocket.fleet.throughputs.table import stacked, throughputs_to_dict, write_throughputs
    from hocket.view.fleet_data import gang_plans_data, prediction_data

    for name, is_given in (("--name", job_type), ("--measured", measured)):
        if is_given is not None and len(models) > 1:
            raise UsageError(f"{name} is for one model", hint="give one MODEL at a time")
    if planned and measured is not None:
        raise UsageError("--measured is for data parallel gangs", hint="leave out --planned")
    servers, sizes = _servers(device_types, network_bps), _gangs(gangs)
    speeds = _measured(measured)
    fitted = None if calibration is None else read_calibration(calibration)
    graphs = [load_graph(model, options)[0] for model in models]
    announce_compilation()
    data: dict[str, Any]
    if planned:
        with working("planning every gang"):
            plans = {
                job_type or graph.name: plan_gangs(graph, servers, sizes, calibration=fitted)
                for graph in graphs
            }
        tables = [planned_throughputs(some, name) for name, some in plans.items()]
        data = {"plans": {name: gang_plans_data(some) for name, some in plans.items()}}
        shown = [line for name, some in plans.items() for line in _plan_lines(name, some)]
    else:
        found = [
            predict(graph, servers, sizes, job_type=job_type, calibration=fitted, measured=speeds)
            for graph in graphs
        ]
        tables = [prediction.throughputs for prediction in found]
        data = {"models": [prediction_data(prediction) for prediction in found]}
        shown = [line for prediction in found for line in _prediction_lines(prediction)]
    table = stacked(tables)
    if output is not None:
        write_throughputs(output, table)
    answer(as_json, {"throughputs": throughputs_to_dict(table), **data}, *shown)
    if output is not None and not as_json:
        say(f"wrote {output} — next: hocket fleet simulate TRACE --throughputs {output}")


def _plan_lines(name: str, plans: list[GangPlan]) -> list[RenderableType]:
    """Table of one model's gangs, each with the strategy of its plan."""
    from hocket.view import table as tables
    from hocket.view.fleet_data import gang_plans_data
    from hocket.view.names import LONGEST_SENTENCE, inert

    rows = [
        [
            inert(str(row["device_type"]), 60),
            str(row["gang"]),
            f"{row['steps_per_s']:.4g}" if row["steps_per_s"] else "–",
            inert(str(row["how"] or row["why"]), LONGEST_SENTENCE),
        ]
        for row in gang_plans_data(plans)
    ]
    columns = (
        tables.name("device type"), tables.number("gang"), tables.number("steps/s"),
        tables.name("by"),
    )  # fmt: skip
    title = f"{inert(name, 200)}: steps of the whole batch per second"
    return [title, tables.FittedTable(columns=columns, rows=rows)]


def _measured(text: str | None) -> dict[str, float]:
    hint = "write each device type once, like v100=7.8,p100=4.9"
    # A speed of 0 would mean a step of infinite time.
    return parse_pairs(text, "--measured", hint, least=1e-300)


def _servers(text: str, network_bps: float | None) -> list[Servers]:
    from hocket.fleet.throughputs.servers import find_servers

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


def _prediction_lines(prediction: PredictedThroughputs) -> list[RenderableType]:
    """Table of one model's speeds, and the reasons why it cannot run on some device types."""
    from hocket.base.units import format_bytes
    from hocket.view.names import inert
    from hocket.view.table import FittedTable, name, number

    table = prediction.throughputs
    gangs = (number(f"gang of {profile.gang}") for profile in table.profiles)
    hardware = [step.servers.hardware for step in prediction.steps]
    rows = [
        [
            inert(device_type, 60),
            inert(hardware[at % len(hardware)], 60),
            # A speed of 0 in the table means that the step does not fit into memory.
            *(f"{speed:.4g}" if speed > 0.0 else "–" for speed in table.alone[:, at]),
        ]
        for at, device_type in enumerate(table.device_types)
    ]
    model = inert(table.profiles[0].job_type, 200)
    summed = format_bytes(prediction.gradient_bytes)
    return [
        f"{model}: steps per second, {summed} of gradients summed per step",
        FittedTable(columns=(name("device type"), name("taken as"), *gangs), rows=rows),
        *(
            f"  {inert(step.servers.name, 60)}: {inert(step.obstacle, 200)}"
            for step in prediction.steps
            if step.obstacle
        ),
    ]
