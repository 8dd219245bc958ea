"""``hocket probe``: the links between the ranks of a launcher as a cluster file."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import json_option
from hocket.cli.sources import give_cluster
from hocket.cli.written import require_folder


@click.command("probe")
@click.option("-o", "--output", type=click.Path(path_type=Path), default=None,
              help="TOML file to write, by the first rank. [default: print it]")  # fmt: skip
@json_option
def command(output: Path | None, as_json: bool) -> None:
    """Measure the links between ranks, in two seconds, and write them as a cluster file.

    Start it once per rank, as the program that it is for is started: ``torchrun --nnodes 4
    --nproc-per-node 1 … -m hocket probe -o cluster.toml``. ``HOCKET_CLUSTER=cluster.toml`` then
    spares that program the measuring, and ``hocket collective allreduce --on cluster.toml`` shows
    what the links allow.
    """
    from hocket.api.clusters import probe_links

    if output is not None:
        require_folder(output)
    rank, cluster = probe_links()
    if rank == 0:
        give_cluster(cluster, output, as_json, "hocket collective allreduce")
