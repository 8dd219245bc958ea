"""Locks of files and folders that the kernel lets go with the process that held them.

A lock belongs to the open file: closing its last descriptor lets it go, and a program that inherits
the descriptor holds it on. On a file system without locks nothing can be held: `try_lock` says no
as if another held it, and `wait_for_lock` raises `OSError`.
"""

from __future__ import annotations

import fcntl


def wait_for_lock(descriptor: int) -> None:
    """Hold the lock of an open file, however long another holds it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)


def try_lock(descriptor: int) -> bool:
    """Hold the lock of an open file if nobody else does; whether it is held now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def is_locked(descriptor: int) -> bool:
    """True if another process holds the lock of an open file, which may be read-only."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
