"""The graph of a training step: `graph.graph` has the type, `graph.build` builds one.

`graph.files` reads and writes graph files, `graph.batches` scales a step to another batch size,
`graph.meeting` finds ops that mix samples, `graph.coarsen` makes smaller graphs.
"""

from hocket.graph.build import GraphBuilder, OpColumns, TensorColumns, assemble
from hocket.graph.files import graph_from_dict, graph_to_dict, read_graph, write_graph
from hocket.graph.generators import FAMILIES, generate
from hocket.graph.graph import DTYPES, Graph, Phase, Role, StatedTimes, Stream
from hocket.graph.verify import verify_graph

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
    "read_graph",
    "verify_graph",
    "write_graph",
]
