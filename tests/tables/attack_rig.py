"""A shard in a thread, and ways to wait for what tables say."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager

import pytest

from hocket.base.errors import RunError
from hocket.tables import Layout, TableSpec

ONE = Layout((TableSpec("w", 4, 2, staleness=1),))


@contextmanager
def served(server):
    """A shard that runs in a thread."""
    stop = threading.Event()
    thread = threading.Thread(target=server.run, args=(stop,))
    thread.start()
    try:
        yield server
    finally:
        stop.set()
        thread.join()
        server.abandon()


def refused(use, pattern):
    """Use tables until they say so; that a shard is slow to answer they may say before."""
    while True:
        with pytest.raises(RunError) as found:
            use()
        if re.search(pattern, found.value.message):
            return
        assert "has sent nothing" in found.value.message


def wait_until(node, is_done):
    node.wait_for(is_done, "to do so in a test")
