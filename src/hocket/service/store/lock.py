"""One daemon per state folder: a lock that the kernel releases when its process ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hocket.base.errors import InputFileError
from hocket.base.locks import try_lock
from hocket.service.plain_file import open_plain

NAME = "lock"


class FolderLock:
    """Lock that is held from its creation until `close` or the end of the process."""

    def __init__(self, folder: Path) -> None:
        path = folder / NAME
        # The descriptor is not inherited by child processes, which would hold the lock after this
        # process ends.
        self._descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
        if not try_lock(self._descriptor):
            holder = os.read(self._descriptor, 100).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise InputFileError(
                f"another daemon or agent runs on this folder (process {holder or 'unknown'})",
                hint="stop it first, or name another folder",
                where=str(folder),
            )
        # The process id is only information for users. If the disk is full, the lock is held
        # without it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the folder for another daemon."""
        os.close(self._descriptor)
