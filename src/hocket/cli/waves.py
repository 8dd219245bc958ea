"""``hocket waves``: predict the gain of two interleaved waves of microbatches (Wavelet).

Searches the start of the second wave on one device, or simulates waves over model partitions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from hocket.cli.declare import declare, option
from hocket.cli.options import ModelOn
from hocket.cli.output import console, emit, fail, say, working
from hocket.cli.sources import announce_compilation, load_graph, make_problem, named_cluster
from hocket.cli.written import named_graph, require_folder

if TYPE_CHECKING:
    from hocket.plan.problem import Problem
    from hocket.planners.waves.round_robin import PartitionFit
    from hocket.planners.waves.wave_search import WaveFit


@declare("waves")
def command(
    *,
    request: ModelOn,
    num_waves: Annotated[
        int,
        option(
            "Microbatches per step; two streams run them in turns.",
            "--waves",
            type=click.IntRange(2, 1024),
        ),
    ] = 2,
    launches: Annotated[
        Literal["eager", "replayed"],
        "The host launches op by op (eager), or a captured graph of the step is replayed.",
    ] = "replayed",
    changes: Annotated[
        Literal["step", "wave"],
        "Update parameters after each step, or after each wave as published (other results).",
    ] = "step",
    partitions: Annotated[
        bool, "Cut the model into as many partitions as devices; waves take them in turn."
    ] = False,
    output: Annotated[
        Path | None, option("Plan file to write. [default: nothing is written]", "-o", "--output")
    ] = None,
    as_json: bool,
) -> None:
    """Predict the gain of two waves of MODEL_OR_GRAPH on the same devices, or why they do not pay.

    Two streams run the microbatches of a batch at the same time, the second behind the first; its
    start is searched. Compares all samples at once, microbatches one after the other, and both
    streams. Exit code 4 where no two waves fit.
    """
    from hocket.api.waves import waves_of
    from hocket.base.errors import NoFeasiblePlanError
    from hocket.view import waves as view

    if output is not None:
        require_folder(output)
    named_cluster(request.on)
    announce_compilation()
    graph, graph_file = load_graph(request.source, request.options)
    problem = make_problem(graph, request)
    if partitions:
        _in_partitions(problem, output, graph_file, as_json=as_json)
        return
    with working("searching when the second wave begins"):
        forecast = waves_of(
            problem,
            memory_bytes=request.memory_bytes,
            num_waves=num_waves,
            launches=launches,
            changes=changes,
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
    written = [] if output is None else [output]
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
        written = [] if output is None else [output]
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
    """Print the written file and the command that runs it; ``slower`` names a better plan."""
    named = f"{plan.name}: {slower}" if slower else plan.name
    inside = f"hocket.prepare(model, optimizer, batch, plan={str(plan)!r})"
    if problem.cluster.num_devices > 1:
        following = f"next: hocket launch {plan} train.py, whose script calls {inside}"
    elif slower:
        following = f"to time it: hocket run {plan}"
    else:
        following = f"next: hocket run {plan}, or train with {inside}"
    say(f"wrote {named} — {following}; hocket show {plan} --report report.html draws both streams")
