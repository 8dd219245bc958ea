"""Advisory locks on files and folders, which the kernel releases when their process ends.

A lock belongs to the open file: closing its last descriptor releases it, and a child process that
inherits the descriptor keeps it. On a file system without locks, `try_lock` returns False as if
another process held the lock, and `wait_for_lock` raises `OSError`.
"""

from __future__ import annotations

import fcntl


def wait_for_lock(descriptor: int) -> None:
    """Wait for the lock of an open file and take it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int) -> bool:
    """Take the lock of an open file if it is free; True if it is held now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
