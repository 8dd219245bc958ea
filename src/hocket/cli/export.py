"""``hocket export``: write a plan as flags, configuration or script of a training program.

Transformer plans go to Megatron, TorchTitan, DeepSpeed or PyTorch. Placements go to Accelerate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click

from hocket.cli.declare import FOLDER, argument, declare, option
from hocket.cli.output import emit, say
from hocket.cli.written import write_folder


@declare("export")
def command(
    *,
    plan_file: Annotated[Path, argument("PLAN")],
    target: Annotated[
        Literal["megatron", "torchtitan", "deepspeed", "torch", "accelerate"],
        option(
            "The training program; accelerate takes placements, the others parallel plans.", "--to"
        ),
    ],
    output: Annotated[
        Path | None,
        option(
            "Folder to write to; it is made where it is not there. [default: print the files]",
            "-o",
            "--output",
            type=FOLDER,
        ),
    ] = None,
    as_json: bool,
) -> None:
    """Write PLAN as flags, configuration or script of a training program.

    A decision that the program cannot express is an error. A placement for Accelerate becomes the
    device_map that is nearest to it, and the difference is printed.
    """
    files, extra = _exported(plan_file, target)
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


def _exported(plan_file: Path, target: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the files for a training program, and additional keys for the JSON output."""
    from hocket.base.errors import UsageError
    from hocket.base.units import format_percent
    from hocket.cli.sources import load_plan
    from hocket.export import export_plan
    from hocket.plan.sections import Placement
    from hocket.plan.transformer_plan import TransformerPlan, is_transformer_plan

    saved = load_plan(plan_file, None)
    is_placement = saved.plan.get(Placement) is not None
    if target != "accelerate" and is_transformer_plan(saved.plan):
        return export_plan(TransformerPlan(saved.problem, saved.plan), target), {}
    if target != "accelerate" or not is_placement:
        takes = "placements" if target == "accelerate" else "plans of hocket parallel"
        raise UsageError(
            f"{target} takes {takes}, and {str(plan_file)!r} is none",
            hint="plan with hocket parallel for megatron, torchtitan, deepspeed or torch, with "
            "hocket plan --planner auto for accelerate; hocket run executes every plan",
        )
    from hocket.export.accelerate import device_map

    found = device_map(saved.problem, saved.plan)
    if found.elsewhere_share > 0:
        say(
            f"note: {format_percent(found.elsewhere_share)} of the computing time is planned on "
            "another device than its module's; Accelerate keeps modules whole"
        )
    return found.files, {"elsewhere_share": found.elsewhere_share}
