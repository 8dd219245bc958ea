"""``hocket verify``: prove a plan legal, or say where it is not."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.cli.output import emit, fail, json_option
from hocket.cli.sources import announce_compilation, load_plan, plan_arguments, refuse_graph

if TYPE_CHECKING:
    from hocket.plan.verify import Violation


@click.command("verify")
@plan_arguments
@json_option
def command(plan_file: Path, graph_file: Path | None, as_json: bool) -> None:
    """Check PLAN: every op placed once, precedence, groups, memory. Exit 6 on a violation."""
    from hocket.base.errors import CheckError

    found = _found(plan_file, graph_file)
    listed = {"violations": [asdict(violation) for violation in found]}
    if found:
        message = "; ".join(violation.message for violation in found[:5])
        error = CheckError(message, where=str(plan_file))
        raise SystemExit(fail(error, as_json=as_json, extra=listed))
    if as_json:
        emit({"ok": True, **listed})
    else:
        click.echo(f"{plan_file}: legal")


def _found(plan_file: Path, graph_file: Path | None) -> list[Violation]:
    from hocket.plan.communication_files import holds_collective, read_collective
    from hocket.plan.parallel_files import holds_parallel_plan, read_parallel_plan
    from hocket.simulate.verify import violations

    if holds_collective(plan_file):
        refuse_graph(graph_file)
        saved_collective = read_collective(plan_file)
        saved_collective.section.verify(saved_collective.cluster)
        return []
    if holds_parallel_plan(plan_file):
        from hocket.planners.parallelism.verify import parallel_violations

        refuse_graph(graph_file)
        return parallel_violations(read_parallel_plan(plan_file))
    saved = load_plan(plan_file, graph_file)
    announce_compilation()
    return violations(saved.plan, saved.problem)
