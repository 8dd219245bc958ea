"""Names, checks and writing of output files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.graph.graph import Graph

MAX_EMBEDDED_OPS = 20_000
"""Largest number of ops whose graph is embedded in a plan; above, the plan names the graph file."""


def require_folder(output: Path) -> None:
    """Refuse an output path that cannot be written, before any work is done for it."""
    from hocket.base.errors import UsageError

    try:
        obstacle = _obstacle(output)
    except OSError as error:
        obstacle = str(error.strerror)
    if obstacle:
        raise UsageError(
            f"cannot write {str(output)!r}: {obstacle}", hint="write elsewhere with -o"
        )


def _obstacle(output: Path) -> str:
    """Reason why a file cannot be written; empty if there is none."""
    if output.is_dir():
        return "it is a folder"
    if output.suffix == ".py":
        return "it would be Python source, which no command writes"
    if not output.absolute().parent.is_dir():
        return f"there is no folder {str(output.parent)!r}"
    # A pipe or a device is written to directly. A file is replaced by a rename in the folder that a
    # link leads to, so that folder must be writable.
    is_replaced = output.is_file() or not output.exists()
    if is_replaced and not os.access(os.path.dirname(os.path.realpath(output)), os.W_OK):
        return "nothing can be written into its folder"
    return ""


def write_folder(folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Write files into a folder, which is created if missing; return their paths."""
    from hocket.base.atomic import write_atomically
    from hocket.base.errors import UsageError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the folder {str(folder)!r}: {error.strerror}", hint="write elsewhere"
        ) from None
    for name, text in files.items():
        write_atomically(folder / name, text.encode())
    return {name: str(folder / name) for name in files}


def beside(output: Path, name: str) -> Path:
    """Path of ``name`` in the folder of a plan file, with the plan's name before it unless
    ``plan.json``.
    """
    stem = output.name.removesuffix(".gz").removesuffix(".json")
    return output.with_name(name if stem == "plan" else f"{stem}.{name}")


def named_graph(graph: Graph, graph_file: Path | None) -> Path | None:
    """The graph file, if the graph is too large to be embedded in a plan; else None."""
    return graph_file if graph.num_ops > MAX_EMBEDDED_OPS else None
