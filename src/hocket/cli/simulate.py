"""``hocket simulate``: what a plan costs, from its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hocket.cli.output import console, emit, json_option, working
from hocket.cli.sources import announce_compilation, load_plan, plan_arguments, refuse_graph


@click.command("simulate")
@plan_arguments
@click.option(
    "--transfers",
    type=click.Choice(["shared", "queued", "parallel"]),
    default=None,
    help="Instead of what the plan was made with.",
)
@json_option
def command(plan_file: Path, graph_file: Path | None, transfers: Any, as_json: bool) -> None:
    """Simulate PLAN and print its step time, memory and use of devices and links."""
    from hocket.plan.parallel_files import holds_parallel_plan

    if holds_parallel_plan(plan_file):
        from hocket.cli.parallel_plans import simulate_parallel

        refuse_graph(graph_file)
        simulate_parallel(plan_file, as_json)
        return
    from hocket.simulate.analysis import bottleneck, channel_busy_s
    from hocket.simulate.engine import simulate
    from hocket.simulate.verify import violations

    saved = load_plan(plan_file, graph_file)
    problem = replace(saved.problem, transfers=transfers) if transfers else saved.problem
    announce_compilation()
    with working("simulating"):
        timeline = simulate(problem, saved.plan)
    span_s = timeline.makespan_s or 1.0
    names, routes = problem.cluster.device_names, problem.costs.routes
    result = {
        "planner": saved.plan.planner,
        "transfers": problem.transfers,
        "step_s": timeline.makespan_s,
        "predicted_step_s": saved.predicted_step_s,
        "peak_bytes": dict(zip(names, timeline.peak_bytes.tolist(), strict=True)),
        "feasible": not violations(saved.plan, problem, timeline),
        "device_busy": dict(zip(names, (timeline.busy_s / span_s).tolist(), strict=True)),
        "link_busy": dict(
            zip(
                routes.channel_names,
                (channel_busy_s(timeline, problem) / span_s).tolist(),
                strict=True,
            )
        ),
        "transfers_sent": len(timeline.transfer_tensor),
        "bottleneck": bottleneck(timeline, problem),
    }
    if as_json:
        emit(result)
        return
    from hocket.view.text import plan_summary

    console().print(plan_summary(problem, saved.plan, timeline))
