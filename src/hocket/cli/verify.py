"""``hocket verify``: prove a plan legal, or say where it is not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from hocket.cli.output import emit, fail, json_option
from hocket.cli.sources import announce_compilation, load_plan, plan_arguments


@click.command("verify")
@plan_arguments
@json_option
def command(plan_file: Path, graph_file: Path | None, as_json: bool) -> None:
    """Check PLAN: every section by its rules, precedence, memory. Exit 6 on a violation."""
    from hocket.base.errors import CheckError
    from hocket.simulate.verify import violations

    saved = load_plan(plan_file, graph_file)
    announce_compilation()
    found = violations(saved.plan, saved.problem)
    listed = {"violations": [asdict(violation) for violation in found]}
    if found:
        message = "; ".join(violation.message for violation in found[:5])
        error = CheckError(message, where=str(plan_file))
        raise SystemExit(fail(error, as_json=as_json, extra=listed))
    if as_json:
        emit({"ok": True, **listed})
    else:
        click.echo(f"{plan_file}: legal")
