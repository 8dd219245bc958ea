"""``hocket launch``: a training script, once per device of a plan."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    "launch", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("plan", type=click.Path(path_type=Path))
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(plan: Path, script: Path, arguments: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGUMENTS in one process per device of PLAN, as torchrun does.

    In SCRIPT hocket.prepare finds its part of PLAN. A rank that is killed or fails is named, and
    all end with it (exit 5). What ranks print goes to standard error.
    """
    from hocket.base.extras import require

    require("torch", "training")
    from hocket.plan.files import read_plan
    from hocket.runtime.launch import launch

    launch(plan, read_plan(plan), script, arguments)
