"""``hocket show``: a plan as a person wants to see it, in the terminal or as a report."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import console, emit, json_option, say
from hocket.cli.sources import announce_compilation, load_plan, plan_arguments, refuse_graph


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
    from hocket.plan.parallel_files import holds_parallel_plan

    if holds_parallel_plan(plan_file):
        from hocket.cli.parallel_plans import show_parallel

        refuse_graph(graph_file)
        show_parallel(plan_file, report, trace, as_json)
        return
    from hocket.simulate.engine import simulate
    from hocket.view.report import write_report
    from hocket.view.text import plan_summary
    from hocket.view.trace import write_trace

    saved = load_plan(plan_file, graph_file)
    announce_compilation()
    timeline = simulate(saved.problem, saved.plan)
    if report is not None:
        write_report(report, saved.problem, saved.plan, timeline)
        say(f"wrote {report}")
    if trace is not None:
        write_trace(trace, saved.problem, saved.plan, timeline)
        say(f"wrote {trace}")
    if as_json:
        device_of = saved.plan.device_of
        assert device_of is not None
        names = saved.problem.cluster.device_names
        emit(
            {
                "planner": saved.plan.planner,
                "step_s": timeline.makespan_s,
                "peak_bytes": dict(zip(names, timeline.peak_bytes.tolist(), strict=True)),
                "placement": {
                    op: names[device]
                    for op, device in zip(
                        saved.problem.graph.op_names, device_of.tolist(), strict=True
                    )
                },
            }
        )
        return
    console().print(plan_summary(saved.problem, saved.plan, timeline))
