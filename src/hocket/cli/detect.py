"""``hocket detect``: this machine as a cluster file."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import emit, json_option, working


@click.command("detect")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="TOML file to write. [default: print it]",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Describe the processor as this many devices: the processes of hocket run --backend gloo.",
)
@json_option
def command(output: Path | None, processes: int, as_json: bool) -> None:
    """Describe this machine's devices and links as a TOML cluster file."""
    from hocket.api.clusters import cluster_to_dict, cluster_to_toml, detect
    from hocket.base.atomic import write_atomically

    with working("looking at this machine"):
        cluster = detect(processes)
    text = cluster_to_toml(cluster)
    if output is not None:
        write_atomically(output, text.encode())
    if as_json:
        emit({"file": str(output) if output else None, "cluster": cluster_to_dict(cluster)})
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"wrote {output} — next: hocket plan gpt2 --on {output}")
