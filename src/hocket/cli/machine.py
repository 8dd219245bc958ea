"""``hocket detect`` and ``probe``: write this machine, or the measured links of ranks, as a
cluster.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from hocket.cli.declare import declare, option
from hocket.cli.output import emit, working
from hocket.cli.written import require_folder

if TYPE_CHECKING:
    from hocket.hardware.cluster import Cluster


@declare("detect")
def detect(
    *,
    output: Annotated[
        Path | None, option("TOML file to write. [default: print it]", "-o", "--output")
    ] = None,
    processes: Annotated[
        int,
        option(
            "Describe the CPU as this many devices: the processes of hocket run --backend gloo.",
            type=click.IntRange(1, 64),
        ),
    ] = 1,
    as_json: bool,
) -> None:
    """Describe this machine's devices and links as a TOML cluster file."""
    from hocket.api.clusters import detect as detect_cluster

    if output is not None:
        require_folder(output)
    with working("inspecting this machine"):
        cluster = detect_cluster(processes)
    _give(cluster, output, as_json, "hocket plan gpt2")


@declare("probe")
def probe(
    *,
    output: Annotated[
        Path | None,
        option("TOML file to write, by the first rank. [default: print it]", "-o", "--output"),
    ] = None,
    as_json: bool,
) -> None:
    """Measure the links between ranks, in two seconds, and write them as a cluster file.

    Start it once per rank, as the program that it is for is started: ``torchrun --nnodes 4
    --nproc-per-node 1 … -m hocket probe -o cluster.toml``. With ``HOCKET_CLUSTER=cluster.toml``
    that program need not measure again, and ``hocket collective allreduce --on cluster.toml`` shows
    what the links allow.
    """
    from hocket.api.clusters import probe_links

    if output is not None:
        require_folder(output)
    rank, cluster = probe_links()
    if rank == 0:
        _give(cluster, output, as_json, "hocket collective allreduce")


def _give(cluster: Cluster, output: Path | None, as_json: bool, next_command: str) -> None:
    """Write or print a cluster, and name a command that takes it."""
    from hocket.base.atomic import write_atomically
    from hocket.hardware.files import cluster_to_toml
    from hocket.view.inputs import cluster_data

    text = cluster_to_toml(cluster)
    if output is not None:
        write_atomically(output, text.encode())
    if as_json:
        emit(cluster_data(cluster, output))
    elif output is None:
        click.echo(text, nl=False)
    else:
        click.echo(f"wrote {output} — next: {next_command} --on {output}")
