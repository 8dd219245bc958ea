"""``hocket generate``, ``schema`` and ``completion``: synthetic graphs, JSON Schemas, shell
scripts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click
from click.shell_completion import get_completion_class

from hocket.cli.declare import argument, declare, option
from hocket.cli.output import answer, emit, working


@declare("generate")
def generate(
    *,
    family: Annotated[str, argument()],
    num_ops: Annotated[
        int, option("About how many ops.", "--ops", type=click.IntRange(1, 2_000_000))
    ] = 2000,
    seed: Annotated[
        int, option("Seed of the random sizes and edges.", type=click.IntRange(0, 2**31 - 1))
    ] = 0,
    output: Annotated[
        Path, option("Graph file (gzipped when the name ends in .gz) to write.", "-o", "--output")
    ],
    as_json: bool,
) -> None:
    """Write a graph of FAMILY: chain, series-parallel, layered, gnmt or transformer."""
    from hocket.graph.files import write_graph
    from hocket.graph.generators import generate as generate_graph
    from hocket.view.inputs import graph_data

    with working(f"generating {num_ops} ops"):
        graph = generate_graph(family, num_ops, seed)
        write_graph(graph, output)
    answer(
        as_json,
        graph_data(graph, output),
        f"wrote {output}: {graph.num_ops} ops, {graph.num_tensors} tensors",
    )


@declare("schema")
def schema(
    *,
    what: Annotated[Literal["plan"], argument()],
    as_json: bool,
) -> None:
    """Print the JSON Schema of a file format."""
    from hocket.plan.files import json_schema

    emit(json_schema())


@declare("completion")
def completion(
    *,
    shell: Annotated[Literal["bash", "zsh", "fish"], argument()],
    as_json: bool,
) -> None:
    """Print a completion script; for bash: eval "$(hocket completion bash)"."""
    found = get_completion_class(shell)
    assert found is not None
    script = found(
        click.get_current_context().find_root().command, {}, "hocket", "_HOCKET_COMPLETE"
    ).source()
    answer(as_json, {"shell": shell, "script": script}, script)
