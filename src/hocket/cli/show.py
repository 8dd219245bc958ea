"""``hocket show``: a plan as a person wants to see it, in the terminal or as a report."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import console, emit, json_option, say
from hocket.cli.sources import announce_compilation, load_plan, plan_arguments


@click.command("show")
@plan_arguments
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    default=None,
    help="Also write the HTML report here.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    default=None,
    help="Also write the Perfetto trace here.",
)
@json_option
def command(
    plan_file: Path,
    graph_file: Path | None,
    report: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Show PLAN: devices, memory, links and the ops that take the most time."""
    from hocket.base.atomic import write_atomically
    from hocket.simulate.engine import simulate
    from hocket.simulate.rewriting.step import carried_out
    from hocket.view.plans import view_of, within_budget
    from hocket.view.trace import trace_bytes

    saved = load_plan(plan_file, graph_file)
    announce_compilation()
    problem, plan = carried_out(saved.problem, saved.plan)
    view = view_of(plan, within_budget(saved.problem, saved.plan, problem))
    timeline = simulate(problem, plan)
    if report is not None:
        write_atomically(report, view.report_html(problem, plan, timeline).encode())
        say(f"wrote {report}")
    if trace is not None:
        write_atomically(trace, trace_bytes(trace, view.trace(problem, plan, timeline)))
        say(f"wrote {trace}")
    if as_json:
        emit(view.shown(problem, plan, timeline))
    else:
        console().print(view.summary(problem, plan, timeline))
