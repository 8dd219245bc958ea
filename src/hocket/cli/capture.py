"""``hocket capture``: record one training step of a PyTorch model as a graph file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

import click

from hocket.cli.declare import argument, declare, option
from hocket.cli.options import ModelOptions
from hocket.cli.output import emit
from hocket.cli.sources import capture_model
from hocket.cli.written import require_folder


@declare("capture")
def command(
    *,
    model: Annotated[str, argument("NAME_OR_FACTORY")],
    output: Annotated[
        Path, option("Graph file (gzipped when the name ends in .gz) to write.", "-o", "--output")
    ],
    device: Annotated[
        Literal["accelerator", "cuda", "cpu"],
        "Whose kernels to record; an accelerator need not be there.",
    ] = "accelerator",
    options: ModelOptions,
    as_json: bool,
) -> None:
    """Capture one step of a model with meta tensors: no weights, memory or downloads.

    NAME_OR_FACTORY is a model of the zoo or package.module:function, a function that returns the
    model and a batch.
    """
    from hocket.base.units import format_bytes
    from hocket.graph.files import write_graph
    from hocket.view.inputs import graph_data

    require_folder(output)
    started = time.perf_counter()
    graph = capture_model(model, options, device=device)
    elapsed_s = time.perf_counter() - started
    write_graph(graph, output)
    if as_json:
        emit({**graph_data(graph, output), "seconds": elapsed_s})
        return
    parameters = graph.bytes_by_role().get("parameter", 0)
    click.echo(
        f"{graph.name}: {graph.num_ops} ops, {graph.num_tensors} tensors, "
        f"{format_bytes(parameters)} of parameters, captured in {elapsed_s:.1f} s"
    )
    click.echo(f"wrote {output} — next: hocket plan {output} --on 4xv100-16g")
