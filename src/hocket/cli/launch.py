"""``hocket launch``: a training script, once per device of a plan."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import emit, json_option


@click.command(
    "launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
def command(plan: Path, script: Path, arguments: tuple[str, ...], as_json: bool) -> None:
    """Run SCRIPT with ARGUMENTS in one process per device of PLAN, as torchrun does.

    In SCRIPT hocket.prepare finds its part of PLAN. A rank that is killed or fails is named, and
    all end with it (exit 5). What ranks print goes to standard error. Options of hocket stand
    before PLAN; what follows SCRIPT is the script's.
    """
    from hocket.base.extras import require

    require("torch", "training")
    from hocket.api.launching import launch
    from hocket.api.plans import read_plan

    num_ranks = launch(plan, read_plan(plan), script, arguments)
    if as_json:
        emit({"plan": str(plan), "script": str(script), "ranks": num_ranks})
