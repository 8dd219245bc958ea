"""``hocket generate``, ``schema`` and ``completion``: synthetic graphs, file formats, shells."""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import get_completion_class

from hocket.cli.output import emit, json_option, output_option, working


@click.command("generate")
@click.argument("family")
@click.option("--ops", "num_ops", type=click.IntRange(1, 2_000_000), default=2000,
              help="About how many ops.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), default=0,
              help="Seed of the random sizes and edges.")  # fmt: skip
@output_option("Graph file (gzipped when the name ends in .gz)")
@json_option
def generate(family: str, num_ops: int, seed: int, output: Path, as_json: bool) -> None:
    """Write a graph of FAMILY: chain, series-parallel, layered, gnmt or transformer."""
    from hocket.graph.files import write_graph
    from hocket.graph.generators import generate as generate_graph
    from hocket.view.inputs import graph_data

    with working(f"generating {num_ops} ops"):
        graph = generate_graph(family, num_ops, seed)
        write_graph(graph, output)
    if as_json:
        emit(graph_data(graph, output))
        return
    click.echo(f"wrote {output}: {graph.num_ops} ops, {graph.num_tensors} tensors")


@click.command("schema")
@click.argument("what", type=click.Choice(["plan"]))
@json_option
def schema(what: str, as_json: bool) -> None:
    """Print the JSON Schema of a file format."""
    from hocket.plan.files import json_schema

    emit(json_schema())


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
@click.pass_context
def completion(ctx: click.Context, shell: str, as_json: bool) -> None:
    """Print a completion script; for bash: eval "$(hocket completion bash)"."""
    found = get_completion_class(shell)
    assert found is not None
    script = found(ctx.find_root().command, {}, "hocket", "_HOCKET_COMPLETE").source()
    if as_json:
        emit({"shell": shell, "script": script})
    else:
        click.echo(script)
