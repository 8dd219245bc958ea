"""``hocket export``: a plan in the words of a training program."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hocket.cli.output import emit, json_option, say
from hocket.cli.written import write_folder

if TYPE_CHECKING:
    from hocket.base.errors import UsageError
    from hocket.export.accelerate import DeviceMap


@click.command("export")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Choice(["megatron", "torchtitan", "deepspeed", "torch", "accelerate"]),
    required=True,
    help="The training program; accelerate takes placements, the others parallel plans.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder to write to; it is made where it is not there. [default: print the files]",
)
@json_option
def command(plan_file: Path, target: str, output: Path | None, as_json: bool) -> None:
    """Write PLAN as flags, configuration or script of a training program.

    What the program cannot say is refused, never left out; a placement for Accelerate becomes the
    device_map that is nearest to it, and the difference is printed.
    """
    extra: dict[str, Any] = {}
    if target == "accelerate":
        found = _device_map(plan_file)
        files, extra = found.files, {"elsewhere_share": found.elsewhere_share}
    else:
        files = _parallel(plan_file, target)
    written = {} if output is None else write_folder(output, files)
    if as_json:
        emit({"target": target, "files": files, "written": list(written.values()), **extra})
        return
    for name, text in files.items():
        if output is not None:
            click.echo(f"wrote {written[name]}")
        else:
            # A plan's names must not steer the terminal; files hold printable text only.
            click.echo(f"# ── {name} ──\n{text}")


def _device_map(plan_file: Path) -> DeviceMap:
    from hocket.base.errors import UsageError
    from hocket.base.units import format_percent
    from hocket.cli.sources import load_plan
    from hocket.export.accelerate import device_map
    from hocket.plan.sections import Placement
    from hocket.plan.transformer_plan import is_transformer_plan

    saved = load_plan(plan_file, None)
    if saved.plan.get(Placement) is None:
        if not is_transformer_plan(saved.plan):
            raise _only_run(plan_file)
        raise UsageError(
            "a device_map places modules; a parallel plan divides them",
            hint="export it --to megatron, torchtitan, deepspeed or torch",
        )
    found = device_map(saved.problem, saved.plan)
    if found.elsewhere_share > 0:
        say(
            f"note: {format_percent(found.elsewhere_share)} of the computing time is planned on "
            "another device than its module's; Accelerate keeps modules whole"
        )
    return found


def _parallel(plan_file: Path, target: str) -> dict[str, str]:
    from hocket.base.errors import UsageError
    from hocket.cli.sources import load_plan
    from hocket.export import export_plan
    from hocket.plan.sections import Placement
    from hocket.plan.transformer_plan import TransformerPlan, is_transformer_plan

    saved = load_plan(plan_file, None)
    if not is_transformer_plan(saved.plan):
        if saved.plan.get(Placement) is None:
            raise _only_run(plan_file)
        raise UsageError(
            f"{target} takes parallel plans, and {str(plan_file)!r} is a placement",
            hint="export it --to accelerate, or plan with hocket parallel",
        )
    return export_plan(TransformerPlan(saved.problem, saved.plan), target)


def _only_run(plan_file: Path) -> UsageError:
    """Of a plan that shares the samples or the memory of a captured step over its devices."""
    from hocket.base.errors import UsageError

    return UsageError(
        f"{str(plan_file)!r} shares a captured step over its devices, which no other program says",
        hint="hocket run executes it; to export, plan with --planner auto (for accelerate) or "
        "with hocket parallel (for the others)",
    )
