"""``hocket waves``: gain of two waves of one training on the same devices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.cli.options import FILE, ModelOptions, budget_options, cost_options, model_options
from hocket.cli.output import console, emit, fail, json_option, say, working
from hocket.cli.sources import announce_compilation, load_graph, make_problem, named_cluster
from hocket.cli.written import named_graph, require_folder

if TYPE_CHECKING:
    from hocket.plan.problem import Problem
    from hocket.planners.waves.round_robin import PartitionFit
    from hocket.planners.waves.wave_search import WaveFit


@click.command("waves")
@click.argument("source", metavar="MODEL_OR_GRAPH")
@budget_options(
    metavar="CLUSTER",
    devices="Devices that take equal parts of the batch",
    memory="Bytes that each device may hold, such as 8GiB. [default: what it has]",
)
@click.option(
    "--waves", "num_waves", type=click.IntRange(2, 1024), default=2,
    help="Microbatches per step; two streams run them in turns.",
)  # fmt: skip
@click.option(
    "--launches", type=click.Choice(["eager", "replayed"]), default="replayed",
    help="Whether the host issues op by op or a captured graph of the step is replayed.",
)  # fmt: skip
@click.option(
    "--changes", type=click.Choice(["step", "wave"]), default="step",
    help="After what parameters change: after each wave, as published, results differ.",
)  # fmt: skip
@click.option(
    "--partitions", is_flag=True,
    help="Cut the model into as many partitions as devices; waves take them in turn.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=FILE,
    help="Plan file to write. [default: nothing is written]",
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
    from hocket.api.waves import waves_of
    from hocket.base.errors import NoFeasiblePlanError
    from hocket.cost.roofline import LAUNCHES
    from hocket.plan.sections.waves import CHANGES
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
    if output is not None:
        _write(forecast.fit, output, graph_file)
    written = [] if output is None else [str(output)]
    if as_json:
        emit({**view.data(forecast), "written": written})
    elif output is not None:
        _say_next(problem, output, view.slower_note(forecast.fit))


def _in_partitions(
    problem: Problem, output: Path | None, graph_file: Path | None, *, as_json: bool
) -> None:
    """Compare round-robin waves over partitions of a model with the usual configurations."""
    from hocket.planners.waves.round_robin import fit_partitions
    from hocket.view import waves as view

    with working("simulating waves in turn"):
        fit = fit_partitions(problem)
    if output is not None:
        _write(fit, output, graph_file)
    if as_json:
        written = [] if output is None else [str(output)]
        emit({**view.partition_data(fit), "written": written})
        return
    console().print(view.partition_table(fit))
    if output is not None:
        _say_next(problem, output, view.partition_slower_note(fit))


def _write(fit: WaveFit | PartitionFit, output: Path, graph_file: Path | None) -> None:
    from hocket.plan.files import write_plan

    graph = named_graph(fit.problem.graph, graph_file)
    write_plan(output, fit.problem, fit.plan(), graph_file=graph)


def _say_next(problem: Problem, plan: Path, slower: str) -> None:
    """Print the file and the command that runs it; ``slower`` names a better plan."""
    named = f"{plan.name}: {slower}" if slower else plan.name
    inside = f"hocket.prepare(model, optimizer, batch, plan={str(plan)!r})"
    if problem.cluster.num_devices > 1:
        following = f"next: hocket launch {plan} train.py, whose script calls {inside}"
    elif slower:
        following = f"to time it: hocket run {plan}"
    else:
        following = f"next: hocket run {plan}, or train with {inside}"
    say(f"wrote {named} — {following}; hocket show {plan} --report report.html draws both streams")
