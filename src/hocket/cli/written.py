"""Files that commands write, and the names of those next to a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hocket.graph.graph import Graph

MAX_EMBEDDED_OPS = 20_000
"""Up to this many ops a plan contains the graph of a file; above, it names the file."""


def require_folder(output: Path) -> None:
    """Refuse an output that cannot be a file, before any work is done for it."""
    from hocket.base.errors import UsageError

    try:
        has_folder, is_folder = output.absolute().parent.is_dir(), output.is_dir()
    except OSError as error:
        raise UsageError(
            f"cannot write {str(output)!r}: {error.strerror}", hint="write elsewhere with -o"
        ) from None
    if is_folder:
        raise UsageError(f"{str(output)!r} is a folder", hint="name a file in it with -o")
    if output.suffix == ".py":
        raise UsageError(
            f"{str(output)!r} would be Python source, which no command writes",
            hint="name another file with -o",
        )
    if not has_folder:
        raise UsageError(
            f"there is no folder {str(output.parent)!r}",
            hint="make the folder, or write elsewhere with -o",
        )
    # A pipe or a device is written to as it is; a file is replaced, where a link leads to.
    is_replaced = output.is_file() or not output.exists()
    if is_replaced and not os.access(os.path.dirname(os.path.realpath(output)), os.W_OK):
        raise UsageError(
            f"nothing can be written into the folder of {str(output)!r}",
            hint="write elsewhere with -o",
        )


def write_folder(folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Write files into a folder, which is created if it is missing; return their paths."""
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
    """``name`` in the folder of a plan file, after its name where that is not ``plan.json``."""
    stem = output.name.removesuffix(".gz").removesuffix(".json")
    return output.with_name(name if stem == "plan" else f"{stem}.{name}")


def named_graph(graph: Graph, graph_file: Path | None) -> Path | None:
    """The file of a graph that is too large to be part of a plan."""
    return graph_file if graph.num_ops > MAX_EMBEDDED_OPS else None
