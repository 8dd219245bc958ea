"""The Graph: what to compute. See `graph.graph` for the type and `graph.build` to make one."""

from hocket.graph.build import GraphBuilder, OpColumns, TensorColumns, assemble
from hocket.graph.graph import DTYPES, Graph, Phase, Role, StatedTimes
from hocket.graph.verify import verify_graph

__all__ = [
    "DTYPES",
    "Graph",
    "GraphBuilder",
    "OpColumns",
    "Phase",
    "Role",
    "StatedTimes",
    "TensorColumns",
    "assemble",
    "verify_graph",
]
