"""Runs one node's part of an attempt: ``python -m ...ray_attempt FOLDER PARENT``.

The same supervisor as on a single machine, but one that ends everything at once when its parent,
an actor of Ray, ends: the node is lost then, and its devices are given to others. Nobody reads its
folder any more, so it removes that, too.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys

from hocket.processes import system
from hocket.service.executors.supervisor import run_attempt


def run_part(folder: str, parent: int) -> int:
    """Run the attempt of a folder, as `run_attempt` does, for as long as the parent lives."""
    # Until the supervisor takes this signal, there is nothing but the folder to clear away.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        # SIGTERM makes the supervisor end its commands with the grace of the order, which is 0.
        system.die_with(parent, signal.SIGTERM)
        return run_attempt(folder)
    finally:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(0 if run_part(sys.argv[1], int(sys.argv[2])) == 0 else 1)
