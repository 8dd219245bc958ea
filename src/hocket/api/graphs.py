"""Graphs: files and generators."""

from __future__ import annotations

from pathlib import Path

from hocket.graph.files import read_graph, write_graph
from hocket.graph.generators import generate
from hocket.graph.graph import Graph
from hocket.graph.meeting import reading_samples
from hocket.transformer.files import is_config_file

__all__ = [
    "Graph",
    "generate",
    "read_graph",
    "reading_samples",
    "recorded_step",
    "write_graph",
]


def recorded_step(text: str) -> Graph | None:
    """The graph of a file that knows its batch; None for other files and for names of models."""
    path = Path(text)
    if path.suffix not in (".json", ".gz") or not path.is_file() or is_config_file(path):
        return None
    graph = read_graph(path)
    return graph if graph.other_batch is not None else None
