"""The Graph of a training step: `graph.graph` has the type, `graph.build` makes one.

Generators of synthetic graphs and readers of other formats are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hocket.graph.build import GraphBuilder, OpColumns, TensorColumns, assemble
from hocket.graph.files import graph_from_dict, graph_to_dict, read_graph, write_graph
from hocket.graph.graph import DTYPES, Graph, Phase, Role, StatedTimes, Stream
from hocket.graph.verify import verify_graph

if TYPE_CHECKING:
    from hocket.graph.formats.dnn_partitioning import on_file_terms
    from hocket.graph.generators import FAMILIES, generate

__all__ = [
    "DTYPES",
    "FAMILIES",
    "Graph",
    "GraphBuilder",
    "OpColumns",
    "Phase",
    "Role",
    "StatedTimes",
    "Stream",
    "TensorColumns",
    "assemble",
    "generate",
    "graph_from_dict",
    "graph_to_dict",
    "on_file_terms",
    "read_graph",
    "verify_graph",
    "write_graph",
]

_MODULE_OF = {
    "FAMILIES": "hocket.graph.generators",
    "generate": "hocket.graph.generators",
    "on_file_terms": "hocket.graph.formats.dnn_partitioning",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)
