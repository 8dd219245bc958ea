"""Output of an attempt, read so that nothing a job does to its log can mislead or block."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hocket.service.daemon.assignment import LOGS
from hocket.service.errors import NotFoundError
from hocket.service.plain_file import NotPlainError, open_plain_below


class Log:
    """The log of an attempt, which may not be there yet, or be replaced by its job at any time."""

    def __init__(self, folder: Path, number: int, attempt: int) -> None:
        self._folder = folder
        self._names = (str(number), f"attempt-{attempt}.log")

    def size_bytes(self) -> int:
        """Size of the log; 0 where there is none."""
        with self._opened() as descriptor:
            return 0 if descriptor is None else os.fstat(descriptor).st_size

    def read(self, start: int, length: int) -> bytes:
        """Some of it; empty at its end. Raises `NotFoundError` where something else is there."""
        with self._opened() as descriptor:
            return b"" if descriptor is None else os.pread(descriptor, length, start)

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        descriptor = self._open()
        try:
            yield descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _open(self) -> int | None:
        try:
            return open_plain_below(self._folder, LOGS, *self._names)
        except FileNotFoundError:
            return None
        except NotPlainError:
            raise NotFoundError(
                "this output was replaced by something that is no plain file",
                hint="the job, or another program of its user, did that",
            ) from None
