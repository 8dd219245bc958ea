"""A shard in a process of its own: it gets its layout and address, and serves until it is ended."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path

from hocket.processes.child import Parent, live
from hocket.tables.address import shard_port
from hocket.tables.layout_file import layout_of
from hocket.tables.server import ShardServer


def serve(parent: Parent) -> None:
    """Serve what the parent names, tell it the address, and end when it has nothing more to say."""
    frame = parent.receive()
    if frame is None:
        return
    # Ctrl-C goes to all processes of a terminal; when this one ends, its parent says.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("hocket.tables").addHandler(_ToParent(parent))
    header = frame.header
    layout = layout_of(header["layout"], "the tables")
    port = shard_port(layout, header["shard"], header["address"])
    path = Path(header["checkpoint"]) if header["checkpoint"] else None
    server = ShardServer(
        layout, header["shard"], port, checkpoint=path, checkpoint_s=header["checkpoint_s"]
    )
    parent.send({"what": "serving", "address": port.address})
    stop = threading.Event()
    threading.Thread(target=_until_silent, args=(parent, stop), daemon=True).start()
    server.run(stop)
    server.close()


class _ToParent(logging.Handler):
    """Log lines of a shard, for the log of the process that started it."""

    def __init__(self, parent: Parent) -> None:
        super().__init__()
        self._parent = parent

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it."""
        self._parent.send({"what": "warning", "message": record.getMessage()})


def _until_silent(parent: Parent, stop: threading.Event) -> None:
    while (frame := parent.receive()) is not None and frame.header.get("what") != "end":
        pass
    stop.set()


if __name__ == "__main__":
    live(serve)
