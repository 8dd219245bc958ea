"""Tables of rows shared under bounded staleness: BSP, SSP, pushes, managed communication.

    with local_tables([TableSpec("weights", 10_000, 32, staleness=2)]) as group:
        worker = group.workers[0]          # one for each thread
        rows = worker["weights"].get([3, 7])
        worker["weights"].inc([3, 7], -0.1 * gradient)
        worker.clock()

The protocol is in `core`, as functions of states and messages that `check` runs in millions of
random schedules and `server` and `node` run over a transport.
"""

from hocket.tables.group import Group, local_tables
from hocket.tables.node import Node
from hocket.tables.server import ShardServer
from hocket.tables.spec import Layout, TableSpec
from hocket.tables.worker import Table, Worker

__all__ = [
    "Group",
    "Layout",
    "Node",
    "ShardServer",
    "Table",
    "TableSpec",
    "Worker",
    "local_tables",
]
