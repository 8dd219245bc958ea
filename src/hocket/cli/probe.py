"""``hocket probe``: the links between the ranks of a launcher as a cluster file."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import emit, json_option
from hocket.cli.sources import require_folder


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
    from hocket.api.clusters import cluster_to_dict, cluster_to_toml, probe_links
    from hocket.base.atomic import write_atomically

    if output is not None:
        require_folder(output)
    rank, cluster = probe_links()
    if rank != 0:
        return
    text = cluster_to_toml(cluster)
    if output is not None:
        write_atomically(output, text.encode())
    if as_json:
        emit({"file": str(output) if output else None, "cluster": cluster_to_dict(cluster)})
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"wrote {output} — next: hocket collective allreduce --on {output}")
