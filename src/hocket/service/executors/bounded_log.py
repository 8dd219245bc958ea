"""A log file that keeps its beginning and its end, and never exceeds a limit.

When the file would exceed its limit, the content between its first half and its last eighth is
dropped and replaced by a line with the number of dropped bytes. Users look for what a program
prints first (its settings) and last (why it failed). Copying an eighth per three eighths written
keeps the cost small.
"""

from __future__ import annotations

import contextlib
import os

from hocket.service.plain_file import open_plain


class BoundedLog:
    """Appends to a file; errors are ignored, because a full disk must not end a job.

    Other processes may append to the same file, such as those on other nodes of a gang.
    """

    def __init__(self, path: str, limit_bytes: int) -> None:
        self._descriptor = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._limit_bytes = limit_bytes
        self._dropped_bytes = 0

    def write(self, data: bytes) -> None:
        """Append data, and drop the middle of the file if the limit is reached."""
        piece_bytes = max(self._limit_bytes // 8, 1)
        for start in range(0, len(data), piece_bytes):
            piece = data[start : start + piece_bytes]
            written_bytes = 0
            with contextlib.suppress(OSError):
                self._drop_middle(len(piece))
                written_bytes = os.write(self._descriptor, piece)
            self._dropped_bytes += len(piece) - written_bytes

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _drop_middle(self, num_bytes: int) -> None:
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes + num_bytes <= self._limit_bytes:
            return
        head_bytes, tail_bytes = self._limit_bytes // 2, self._limit_bytes // 8
        tail = os.pread(self._descriptor, tail_bytes, size_bytes - tail_bytes)
        self._dropped_bytes += size_bytes - head_bytes - len(tail)
        os.ftruncate(self._descriptor, head_bytes)
        note = f"\n[hocket: {self._dropped_bytes} bytes dropped here, the log is limited]\n"
        os.write(self._descriptor, note.encode() + tail)
