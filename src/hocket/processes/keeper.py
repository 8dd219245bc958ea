"""Ends what a crew leaves behind: ``python -m hocket.processes.keeper MARK PARENT``.

The kernel ends the processes of a crew with the one that started them, but not what these have
started. All of it carries the crew's mark in its environment, so this process, which does not,
waits until the parent is gone, finds it and kills it. A parent that ends its crew itself says so.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

from hocket.processes import system

FAREWELL = b"."
_TRIES, _LOOK_S = 200, 0.02


def keep(mark: str, parent: int) -> None:
    """Wait for the end of the parent; it is not to be mistaken for its standard input's end, which
    another process may hold open."""
    watched = [0]
    with contextlib.suppress(OSError):
        watched.append(os.pidfd_open(parent))
    if os.getppid() == parent:
        readable, _, _ = select.select(watched, [], [])
        if 0 in readable and os.read(0, 1) == FAREWELL:
            return
    for _ in range(_TRIES):
        if system.end_marked(mark):
            return
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    keep(sys.argv[1], int(sys.argv[2]))
