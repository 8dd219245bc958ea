"""Open files safely in folders that a job may write to.

A job can replace its output or the files of its service by a symbolic link to a file that it may
not read, by a pipe without a writer, or by a hard link. So links are not followed, opening never
blocks, and only plain files with one name are opened. Only the standard library is imported,
because every supervisor loads this file.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# Links are not followed, and opening a pipe or terminal neither blocks nor takes it over.
_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class NotPlainError(OSError):
    """The path is no plain file, or the file has other names too."""

    def __init__(self, path: object) -> None:
        super().__init__(errno.EINVAL, "it is no plain file", str(path))


def open_plain(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a plain file; raises `OSError` (`NotPlainError`) for anything else."""
    try:
        descriptor = os.open(path, flags | _FLAGS, 0o600)
    except OSError as error:
        # A link, or a pipe or socket with nobody at its other end.
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise NotPlainError(path) from None
        raise
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(descriptor)
        raise NotPlainError(path)
    return descriptor


def open_plain_below(folder: Path, *names: str) -> int:
    """Like `open_plain` for a file below a folder; no folder in between may be a link."""
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in names[:-1]:
            below = _folder_in(opened, name)
            os.close(opened)
            opened = below
        # Through the descriptor of the folder: a path would be resolved again, and a folder on it
        # may have been replaced since.
        return open_plain(f"/proc/self/fd/{opened}/{names[-1]}")
    finally:
        os.close(opened)


def _folder_in(descriptor: int, name: str) -> int:
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=descriptor)
    except NotADirectoryError:
        raise NotPlainError(name) from None


def trust_problem(found: os.stat_result, *, is_secret: bool) -> str:
    """Reason why a file or folder cannot be trusted; empty if it can."""
    if found.st_uid != os.geteuid():
        return f"it belongs to another user (number {found.st_uid})"
    if found.st_mode & 0o022:
        return "others may write to it"
    if is_secret and found.st_mode & 0o077:
        return "others can read it"
    return ""
