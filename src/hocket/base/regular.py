"""Open user-named files safely: regular files only, without blocking on pipes or devices."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO

from hocket.base.errors import InputFileError, system_reason


def is_file(path: str | Path) -> bool:
    """True if the file exists; False for text that cannot be a path."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long for a path, or a null character
        return False


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a file for reading; raises `OSError` for folders, pipes, sockets and devices.

    Opening a pipe would block until another process writes to it.
    """
    # O_NONBLOCK: opening a pipe without a writer would otherwise wait before its type can be
    # checked.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not a file", str(path))


def read_regular(path: str | Path, max_bytes: int) -> bytes:
    """Contents of a file; raises `InputFileError` if it cannot be read or is too large."""
    try:
        with open_regular(path) as file:
            # The size is checked before memory is allocated: a sparse file may claim a terabyte.
            is_large = os.fstat(file.fileno()).st_size > max_bytes
            content = b"" if is_large else file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        reason = system_reason(error)
        raise InputFileError(f"cannot be read: {reason}", where=str(path)) from None
    if is_large or len(content) > max_bytes:
        raise InputFileError(f"is larger than {max_bytes // 10**6} MB", where=str(path))
    return content
