"""Lines that a rank prints, each with the rank's number before it: ``[rank1]: loss 0.3``.

Only what Python writes; libraries that write to the descriptor themselves are not seen here.
"""

from __future__ import annotations

import io
import sys


class RankStream(io.TextIOWrapper):
    """Standard output or error of one rank among several."""

    def __init__(self, stream: io.TextIOWrapper, rank: int) -> None:
        super().__init__(
            stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
        self._prefix, self._is_at_start = f"[rank{rank}]: ", True

    def write(self, text: str) -> int:
        """Write text, with the rank before every line that begins in it."""
        lines = text.split("\n")
        written = []
        for index, line in enumerate(lines):
            is_last = index + 1 == len(lines)
            if line and self._is_at_start:
                written.append(self._prefix)
            written.append(line if is_last else line + "\n")
            self._is_at_start = not is_last or (self._is_at_start and not line)
        super().write("".join(written))
        return len(text)


def name_lines(rank: int) -> None:
    """Put the rank before every line that this process prints from here on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, RankStream):
            stream.flush()
            setattr(sys, name, RankStream(stream, rank))
