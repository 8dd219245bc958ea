"""``hocket explain``: what a plan's time is spent on and what limits it."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import console, emit, json_option
from hocket.cli.sources import announce_compilation, load_plan, plan_arguments


@click.command("explain")
@plan_arguments
@json_option
def command(plan_file: Path, graph_file: Path | None, as_json: bool) -> None:
    """Explain PLAN: its critical path, why devices wait, and what limits the step."""
    from hocket.simulate.engine import simulate
    from hocket.simulate.rewriting.step import carried_out
    from hocket.view.plans import view_of, within_budget

    saved = load_plan(plan_file, graph_file)
    announce_compilation()
    problem, plan = carried_out(saved.problem, saved.plan)
    view = view_of(plan, within_budget(saved.problem, saved.plan, problem))
    timeline = simulate(problem, plan)
    if as_json:
        emit(view.explained(problem, plan, timeline))
    else:
        console().print(view.explanation(problem, plan, timeline))
