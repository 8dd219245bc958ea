"""Graphs: files and generators."""

from __future__ import annotations

from hocket.graph.files import read_graph, write_graph
from hocket.graph.generators import generate
from hocket.graph.graph import Graph

__all__ = [
    "Graph",
    "generate",
    "read_graph",
    "write_graph",
]
