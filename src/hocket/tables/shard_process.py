"""A shard in a process of its own: told what to hold and where to listen, it serves until ended."""

from __future__ import annotations

import threading
from pathlib import Path

from hocket.processes.child import Parent, live
from hocket.tables.address import shard_port
from hocket.tables.layout_file import layout_of
from hocket.tables.server import ShardServer
from hocket.tables.transports.zeromq import ZeroMqShardPort


def serve(parent: Parent) -> None:
    """Serve what the parent names, tell it the address, and end when it has nothing more to say."""
    frame = parent.hear()
    if frame is None:
        return
    told = frame.header
    layout = layout_of(told["layout"], "the tables")
    port = shard_port(layout, told["shard"], told["address"])
    path = Path(told["checkpoint"]) if told["checkpoint"] else None
    server = ShardServer(
        layout, told["shard"], port, checkpoint=path, checkpoint_s=told["checkpoint_s"]
    )
    address = port.address if isinstance(port, ZeroMqShardPort) else told["address"]
    parent.tell({"what": "serving", "address": address})
    stop = threading.Event()
    threading.Thread(target=_until_silent, args=(parent, stop), daemon=True).start()
    server.run(stop)
    if path is not None:
        server.save()


def _until_silent(parent: Parent, stop: threading.Event) -> None:
    while parent.hear() is not None:
        pass
    stop.set()


if __name__ == "__main__":
    live(serve)
