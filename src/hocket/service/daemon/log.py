"""Read the output of an attempt, so that a job's log file cannot mislead or block the reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hocket.service.daemon.assignment import LOGS
from hocket.service.errors import NotFoundError
from hocket.service.plain_file import NotPlainError, open_plain_below


class Log:
    """The log of an attempt, which may not exist yet, and which its job may replace at any time."""

    def __init__(self, folder: Path, number: int, attempt: int) -> None:
        self._folder = folder
        self._names = (str(number), f"attempt-{attempt}.log")

    def size_bytes(self) -> int:
        """Size of the log; 0 if there is none."""
        with self._opened() as descriptor:
            return 0 if descriptor is None else os.fstat(descriptor).st_size

    def read(self, start: int, length: int) -> bytes:
        """Up to ``length`` bytes from ``start``; empty at the end.

        Raises `NotFoundError` if the path is not a plain file.
        """
        with self._opened() as descriptor:
            return b"" if descriptor is None else os.pread(descriptor, length, start)

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        try:
            descriptor = open_plain_below(self._folder, LOGS, *self._names)
        except FileNotFoundError:
            yield None
            return
        except NotPlainError:
            raise NotFoundError(
                "this output was replaced by something that is no plain file",
                hint="the job, or another program of its user, did that",
            ) from None
        try:
            yield descriptor
        finally:
            os.close(descriptor)
