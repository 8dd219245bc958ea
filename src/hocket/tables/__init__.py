"""Tables of rows shared under bounded staleness: BSP, SSP, pushes, managed communication.

    with local_tables([TableSpec("weights", 10_000, 32, staleness=2)]) as group:
        worker = group.workers[0]          # one for each thread
        rows = worker["weights"].get([3, 7])
        worker["weights"].inc([3, 7], -0.1 * gradient)
        worker.clock()

The protocol is in `core`, as functions of states and messages that `check` runs in millions of
random schedules and `server` and `node` run over a transport.
"""

from typing import TYPE_CHECKING, Any

from hocket.tables.group import Group, local_tables
from hocket.tables.node import Node
from hocket.tables.server import ShardServer
from hocket.tables.spec import Layout, TableSpec
from hocket.tables.worker import Table, Worker

if TYPE_CHECKING:
    from hocket.tables.embedding import Embedding, TableOptimizer

__all__ = [
    "Embedding",
    "Group",
    "Layout",
    "Node",
    "ShardServer",
    "Table",
    "TableOptimizer",
    "TableSpec",
    "Worker",
    "local_tables",
]


def __getattr__(name: str) -> Any:
    """Import the modules that need PyTorch on first use."""
    if name in ("Embedding", "TableOptimizer"):
        from hocket.tables import embedding

        return getattr(embedding, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
