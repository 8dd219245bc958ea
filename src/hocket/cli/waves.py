"""``hocket waves``: gain of two waves of one training on the same devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.cli.output import console, emit, fail, json_option, say, working
from hocket.cli.sources import (
    ModelOptions,
    announce_compilation,
    budget_options,
    cost_options,
    load_graph,
    make_problem,
    model_options,
    named_cluster,
)
from hocket.cli.written import beside, named_graph, require_folder

if TYPE_CHECKING:
    from hocket.api.waves import WaveForecast
    from hocket.plan.problem import Problem


@click.command("waves")
@click.argument("source", metavar="MODEL_OR_GRAPH")
@budget_options(
    metavar="CLUSTER",
    devices="Devices that take equal parts of the batch",
    memory="Bytes that each device may hold, such as 8GiB. [default: what it has]",
)
@click.option(
    "--waves", "num_waves", type=click.IntRange(2, 1024), default=2, show_default=True,
    help="Microbatches per step; two streams run them in turns.",
)  # fmt: skip
@click.option(
    "--launches", type=click.Choice(["eager", "replayed"]), default="replayed", show_default=True,
    help="Whether the host issues op by op or a captured graph of the step is replayed.",
)  # fmt: skip
@click.option(
    "--changes", type=click.Choice(["step", "wave"]), default="step", show_default=True,
    help="After what parameters change: after each wave, as published, results differ.",
)  # fmt: skip
@click.option(
    "--partitions", is_flag=True,
    help="Cut the model into as many partitions as devices; waves take them in turn.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=None,
    help="Plan file to write; the report goes beside it. [default: nothing is written]",
)  # fmt: skip
@cost_options
@model_options
@json_option
def command(
    source: str,
    on: str,
    memory_bytes: int | None,
    num_waves: int,
    launches: str,
    changes: str,
    partitions: bool,
    output: Path | None,
    profile: Path | None,
    calibration: Path | None,
    options: ModelOptions,
    as_json: bool,
) -> None:
    """Predict the gain of two waves of MODEL_OR_GRAPH on the same devices, or why they do not pay.

    Two streams run the microbatches of a batch at the same time, the second behind the first; its
    start is searched. Compares all samples at once, microbatches one after the other, and both
    streams. Exit code 4 where no two waves fit.
    """
    from hocket.api.waves import CHANGES, LAUNCHES, waves_of
    from hocket.base.errors import NoFeasiblePlanError
    from hocket.view import waves as view

    if output is not None:
        require_folder(output)
    named_cluster(on)
    announce_compilation()
    graph, graph_file = load_graph(source, options)
    problem = make_problem(graph, on, "shared", profile, calibration)
    if partitions:
        _in_partitions(problem, output, graph_file, as_json=as_json)
        return
    with working("searching when the second wave begins"):
        forecast = waves_of(
            problem,
            memory_bytes=memory_bytes,
            num_waves=num_waves,
            launches=next(name for name in LAUNCHES if name == launches),
            changes=next(name for name in CHANGES if name == changes),
        )
    if not as_json:
        console().print(view.waves_table(forecast))
    if forecast.fit.chosen is None:
        try:
            forecast.fit.plan()
        except NoFeasiblePlanError as error:
            raise SystemExit(fail(error, as_json=as_json, extra=view.data(forecast))) from None
    written = [] if output is None else _write(forecast, output, graph_file)
    if as_json:
        emit({**view.data(forecast), "written": [str(path) for path in written]})
    elif written:
        behind = view.slower_note(forecast.fit)
        names = _named(written, behind)
        if problem.cluster.num_devices > 1:
            _say_launch(names, written[0])
        elif behind:
            say(f"wrote {names} — to time it: hocket run {written[0]}")
        else:
            say(f"wrote {names} — next: hocket run {written[0]}, or train with "
                f"hocket.prepare(model, optimizer, batch, plan={str(written[0])!r})")  # fmt: skip


def _in_partitions(
    problem: Problem, output: Path | None, graph_file: Path | None, *, as_json: bool
) -> None:
    """Waves that take partitions of a model in turn, beside the usual configurations."""
    from hocket.api.waves import fit_partitions, save_round_robin
    from hocket.view import waves as view

    written: list[Path] = []
    with working("simulating waves in turn"):
        fit = fit_partitions(problem)
    if output is not None:
        written = [output, beside(output, "report.html")]
        named = named_graph(fit.problem.graph, graph_file)
        save_round_robin(fit, output, report=written[1], graph_file=named)
    if as_json:
        emit({**view.partition_data(fit), "written": [str(path) for path in written]})
        return
    console().print(view.partition_table(fit))
    if written:
        _say_launch(_named(written, view.partition_slower_note(fit)), written[0])


def _named(written: list[Path], what: str) -> str:
    """Names of files, with a note where the plan is not the best one."""
    names = ", ".join(path.name for path in written)
    return f"{names}: {what}" if what else names


def _say_launch(names: str, plan: Path) -> None:
    """Name the command that runs a plan of several devices."""
    say(f"wrote {names} — next: hocket launch {plan} train.py, whose script calls "
        f"hocket.prepare(model, optimizer, batch, plan={str(plan)!r})")  # fmt: skip


def _write(forecast: WaveForecast, output: Path, graph_file: Path | None) -> list[Path]:
    from hocket.api.waves import save_waves

    report, graph = beside(output, "report.html"), forecast.fit.problem.graph
    save_waves(forecast.fit, output, report=report, graph_file=named_graph(graph, graph_file))
    return [output, report]
