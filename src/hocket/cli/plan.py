"""``hocket plan``: compare planners on one problem and write the best plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.output import console, emit, fail, json_option, say, working
from hocket.cli.sources import (
    ModelOptions,
    announce_compilation,
    load_graph,
    make_problem,
    model_options,
)

if TYPE_CHECKING:
    from hocket.planners.compare import Candidate, Comparison


@click.command("plan")
@click.argument("source", metavar="MODEL_OR_GRAPH")
@click.option(
    "--on",
    required=True,
    metavar="CLUSTER",
    help="A TOML file, a preset, shorthand such as 4xv100-16g, or 'file'.",
)
@click.option(
    "--planner",
    "planners",
    multiple=True,
    metavar="NAME",
    help="Try this planner only; may be given several times. Default: all.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="Plan file to write; report and trace go beside it. "
    "[default: plan.json, nothing with --json]",
)
@click.option(
    "--transfers",
    type=click.Choice(["shared", "queued", "parallel"]),
    default="shared",
    show_default=True,
    help="How simultaneous transfers interact.",
)
@click.option(
    "--profile",
    type=click.Path(path_type=Path),
    default=None,
    help="Measured op times from hocket profile.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    default=None,
    help="Fitted efficiencies from hocket calibrate.",
)
@model_options
@json_option
def command(
    source: str,
    on: str,
    planners: tuple[str, ...],
    output: Path | None,
    transfers: Any,
    profile: Path | None,
    calibration: Path | None,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    optimizer: str,
    as_json: bool,
) -> None:
    """Plan MODEL_OR_GRAPH on a cluster: compare the candidates, write the best.

    MODEL_OR_GRAPH is a graph file, a model of the zoo, or package.module:function.
    """
    from hocket.api import best_of
    from hocket.errors import NoFeasiblePlanError
    from hocket.planners import find_planner
    from hocket.planners.compare import compare

    for name in planners:
        find_planner(name)
    graph, graph_file = load_graph(source, ModelOptions(batch, seq, dtype, optimizer))
    problem = make_problem(graph, on, transfers, profile, calibration)
    announce_compilation()
    with working("planning"):
        comparison = compare(problem, planners)
    if output is None and not as_json:
        output = Path("plan.json")
    try:
        best_of(comparison)
    except NoFeasiblePlanError as error:
        _show(comparison, as_json)
        raise SystemExit(fail(error, as_json=as_json, extra=_as_dict(comparison))) from None
    written = _write(comparison, output, graph_file) if output is not None else []
    if as_json:
        emit({**_as_dict(comparison), "written": [str(path) for path in written]})
        return
    _show(comparison, as_json)
    if written:
        names = ", ".join(path.name for path in written)
        say(f"wrote {names} — next: hocket show {written[0]}, hocket explain {written[0]}")


def _show(comparison: Comparison, as_json: bool) -> None:
    if as_json:
        return
    from hocket.view.text import candidate_table

    console().print(candidate_table(comparison))


def _write(comparison: Comparison, output: Path, graph_file: Path | None) -> list[Path]:
    from hocket.plan.files import write_plan
    from hocket.view.report import write_report
    from hocket.view.trace import write_trace

    winner, problem = comparison.winner, comparison.problem
    assert winner is not None
    assert winner.plan is not None
    assert winner.timeline is not None
    stem = output.name.removesuffix(".gz").removesuffix(".json")
    prefix = "" if stem == "plan" else f"{stem}."
    report = output.with_name(f"{prefix}report.html")
    trace = output.with_name(f"{prefix}trace.json")
    write_plan(
        output,
        problem,
        winner.plan,
        graph_file=graph_file,
        step_s=winner.timeline.makespan_s,
        peak_bytes=_peaks(comparison, winner),
    )
    write_report(report, problem, winner.plan, winner.timeline, comparison)
    write_trace(trace, problem, winner.plan, winner.timeline)
    return [output, report, trace]


def _as_dict(comparison: Comparison) -> dict[str, Any]:
    problem, winner = comparison.problem, comparison.winner
    result: dict[str, Any] = {
        "graph": {
            "name": problem.graph.name,
            "ops": problem.graph.num_ops,
            "hash": problem.graph.content_hash,
        },
        "cluster": {"name": problem.cluster.name, "hash": problem.cluster.content_hash},
        "costs": problem.costs.sources(),
        "candidates": [
            {
                "planner": candidate.planner,
                "feasible": candidate.feasible,
                "step_s": candidate.step_s,
                "peak_bytes": _peaks(comparison, candidate),
                "reason": candidate.reason,
                "plan_seconds": candidate.plan_seconds,
            }
            for candidate in comparison.candidates
        ],
        "chosen": winner.planner if winner else None,
        "why": comparison.why,
    }
    if winner is not None:
        result |= {
            "planner": winner.planner,
            "step_s": winner.step_s,
            "peak_bytes": _peaks(comparison, winner),
            "plan_seconds": winner.plan_seconds,
        }
    return result


def _peaks(comparison: Comparison, candidate: Candidate) -> dict[str, int]:
    if candidate.timeline is None:
        return {}
    names = comparison.problem.cluster.device_names
    return dict(zip(names, candidate.timeline.peak_bytes.tolist(), strict=True))
