"""``hocket export``: a parallel plan in the words of a training program."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import emit, json_option


@click.command("export")
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--to",
    "target",
    type=click.Choice(["megatron", "torchtitan", "deepspeed", "torch"]),
    required=True,
    help="The training program.",
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
    """Write the parallel PLAN as flags, configuration or script of a training program.

    What the program cannot say is refused, never left out.
    """
    from hocket.export import export_plan
    from hocket.plan.parallel_files import read_parallel_plan

    files = export_plan(read_parallel_plan(plan_file), target)
    written = {} if output is None else _write(output, files)
    if as_json:
        emit({"target": target, "files": files, "written": list(written.values())})
        return
    for name, text in files.items():
        if output is not None:
            click.echo(f"wrote {written[name]}")
        else:
            # A plan's names must not steer the terminal; files hold printable text only.
            click.echo(f"# ── {name} ──\n{text}")


def _write(folder: Path, files: dict[str, str]) -> dict[str, str]:
    from hocket.atomic import write_atomically
    from hocket.errors import UsageError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {str(folder)!r}: {error.strerror}", hint="write elsewhere"
        ) from None
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    return {name: str(folder / name) for name in files}
