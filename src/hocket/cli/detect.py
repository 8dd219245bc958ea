"""``hocket detect``: this machine as a cluster file."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import json_option, working
from hocket.cli.sources import give_cluster
from hocket.cli.written import require_folder


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
    from hocket.api.clusters import detect

    if output is not None:
        require_folder(output)
    with working("looking at this machine"):
        cluster = detect(processes)
    give_cluster(cluster, output, as_json, "hocket plan gpt2")
