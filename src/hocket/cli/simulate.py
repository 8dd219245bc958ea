"""``hocket simulate``: what a plan costs, from its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hocket.cli.output import console, emit, json_option, working
from hocket.cli.sources import announce_compilation, load_plan, plan_arguments


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
    from hocket.simulate.engine import simulate
    from hocket.simulate.rewriting.step import carried_out
    from hocket.view.plans import view_of, within_budget

    saved = load_plan(plan_file, graph_file)
    problem, plan = carried_out(saved.problem, saved.plan)
    view = view_of(plan, within_budget(saved.problem, saved.plan, problem))
    problem = replace(problem, transfers=transfers) if transfers else problem
    announce_compilation()
    with working("simulating"):
        timeline = simulate(problem, plan)
    if as_json:
        emit(view.simulated(problem, plan, timeline))
    else:
        console().print(view.summary(problem, plan, timeline))
