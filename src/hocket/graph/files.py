"""Graph files: which format a file has, and how to read and write it.

Formats are told apart by content, never by name, and each may be gzipped: hocket.graph/1 and
memgraph-v1 JSON, the JSON of dnn-partitioning, and PipeDream's ``graph.txt``. What cannot be one of
them is refused after its first 64 KiB.
"""

from __future__ import annotations

import gzip
from pathlib import Path

from hocket.base.atomic import write_atomically
from hocket.base.errors import InputFileError
from hocket.base.fields import located
from hocket.base.jsonfile import dump_json, looks_like_json, parse_json, read_bounded
from hocket.graph.formats.columnar import GRAPH_SCHEMA, graph_from_dict, graph_to_dict
from hocket.graph.formats.dnn_partitioning import (
    graph_from_dnn_partitioning,
    is_dnn_partitioning,
)
from hocket.graph.formats.memgraph import graph_from_memgraph, is_memgraph
from hocket.graph.formats.pipedream import graph_from_pipedream, is_pipedream
from hocket.graph.graph import Graph

__all__ = ["graph_from_dict", "graph_to_dict", "read_graph", "write_graph"]

MAX_FILE_BYTES = 512 * 2**20
"""After decompression; a million ops take about a third of it."""
_GZIP_LEVEL = 3
"""A fifth larger than the default level and three times as fast."""
_FORMATS = (
    f"a graph: {GRAPH_SCHEMA}, dnn-partitioning or memgraph-v1 JSON, or a PipeDream graph.txt"
)


def read_graph(path: str | Path) -> Graph:
    """The verified graph of a file in any known format; raises `InputFileError`."""
    where = str(path)
    data = read_bounded(
        path, MAX_FILE_BYTES, lambda head: looks_like_json(head) or is_pipedream(head), _FORMATS
    )
    with located(where):
        if not looks_like_json(data):
            return _not_empty(graph_from_pipedream(data, _name(path)))
        return _not_empty(_graph_from_json(parse_json(data, where), _name(path)))


def write_graph(graph: Graph, path: str | Path) -> None:
    """Write hocket.graph/1 atomically, gzipped where the name ends in ``.gz``.

    Equal graphs give equal bytes.
    """
    data = dump_json(graph_to_dict(graph))
    if str(path).endswith(".gz"):
        data = gzip.compress(data, _GZIP_LEVEL, mtime=0)
    write_atomically(path, data)


def _graph_from_json(value: object, name: str) -> Graph:
    if not isinstance(value, dict):
        raise InputFileError("the file is a list", hint=f"expected {_FORMATS}")
    if "schema" in value:
        if str(value["schema"]).startswith("hocket.plan/"):
            raise InputFileError(
                "the file is a plan, not a graph",
                hint="give the model or the graph that was planned",
            )
        return graph_from_dict(value, "")
    if is_memgraph(value):
        return graph_from_memgraph(value, name)
    if is_dnn_partitioning(value):
        return graph_from_dnn_partitioning(value, name)
    raise InputFileError(
        "the file is JSON but no graph: it has no key 'schema'", hint=f"expected {_FORMATS}"
    )


def _not_empty(graph: Graph) -> Graph:
    if not graph.num_ops:
        raise InputFileError("the graph has no ops", hint="a graph needs at least one op")
    return graph


def _name(path: str | Path) -> str:
    """A name for graphs whose format has none: the file's, or its folder's for ``graph.txt``."""
    file = Path(path)
    stem = file.name.split(".")[0]
    name = file.absolute().parent.name if stem == "graph" else stem
    return "".join(c if c.isprintable() else "?" for c in name)
