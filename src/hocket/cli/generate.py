"""``hocket generate``: synthetic graphs of a given family and size."""

from __future__ import annotations

from pathlib import Path

import click

from hocket.cli.output import emit, json_option, output_option, working


@click.command("generate")
@click.argument("family")
@click.option(
    "--ops",
    "num_ops",
    type=click.IntRange(1, 2_000_000),
    default=2000,
    show_default=True,
    help="About how many ops.",
)
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0, show_default=True,
              help="Of what is random about it.")  # fmt: skip
@output_option("Graph file (gzipped when the name ends in .gz)")
@json_option
def command(family: str, num_ops: int, seed: int, output: Path, as_json: bool) -> None:
    """Write a graph of FAMILY: chain, series-parallel, layered, gnmt or transformer."""
    from hocket.api.graphs import generate, write_graph
    from hocket.view.inputs import graph_data

    with working(f"generating {num_ops} ops"):
        graph = generate(family, num_ops, seed)
        write_graph(graph, output)
    if as_json:
        emit(graph_data(graph, output))
        return
    click.echo(f"wrote {output}: {graph.num_ops} ops, {graph.num_tensors} tensors")
