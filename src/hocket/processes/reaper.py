"""Kill the descendants of a lost worker group: ``python -m hocket.processes.reaper MARK PARENT``.

The kernel ends workers together with the process that started them, but not the processes that
workers started. All of these have the group's mark in their environment; the reaper does not. The
reaper waits until the parent is gone, then kills all marked processes. A parent that closes its
group itself sends `SHUTDOWN` first.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

from hocket.processes import system

SHUTDOWN = b"."
_TRIES, _LOOK_S = 200, 0.02


def keep(mark: str, parent: int) -> None:
    """Wait until the parent has exited, then kill all marked processes.

    The parent is watched by its process id, because another process may hold standard input open.
    """
    watched = [0]
    with contextlib.suppress(OSError):
        watched.append(os.pidfd_open(parent))
    # If the parent died before this line, this process already has another parent.
    if os.getppid() == parent:
        readable, _, _ = select.select(watched, [], [])
        if 0 in readable and os.read(0, 1) == SHUTDOWN:
            return
    # Repeated, because a process that is killed may just have started another one.
    for _ in range(_TRIES):
        if system.end_marked(mark):
            return
        time.sleep(_LOOK_S)


if __name__ == "__main__":
    keep(sys.argv[1], int(sys.argv[2]))
