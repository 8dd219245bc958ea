"""Runs one node's part of an attempt: ``python -m ...ray_attempt FOLDER PARENT``.

The same supervisor as on a single machine, but one that ends everything at once when its parent,
an actor of Ray, ends: the node is lost then, and its devices are given to others.
"""

from __future__ import annotations

import signal
import sys

from hocket.service.executors import processes
from hocket.service.executors.supervisor import run_attempt

if __name__ == "__main__":
    # SIGTERM makes the supervisor end its commands with the grace of the order, which is 0 here.
    processes.die_with(int(sys.argv[2]), signal.SIGTERM)
    sys.exit(0 if run_attempt(sys.argv[1]) == 0 else 1)
