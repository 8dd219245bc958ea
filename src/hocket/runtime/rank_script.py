"""The user's script as one rank: ``python -m hocket.runtime.rank_script``, started by `launch`.

Runs the script as ``__main__`` with its arguments, prefixes its output lines with the rank, and
reports failures to the parent process.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import traceback

from hocket.base.errors import RunError
from hocket.processes.child import Parent, live
from hocket.runtime.ranks import CommunicationError, lost_another

# Lines that a rank prints get the rank as prefix: ``[rank1]: loss 0.3``.
#
# Output of libraries that write to the file descriptor themselves has no prefix.


class RankStream(io.TextIOWrapper):
    """Standard output or error of one rank among several."""

    def __init__(self, stream: io.TextIOWrapper, rank: int) -> None:
        super().__init__(
            stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True
        )
        self._prefix, self._is_at_start = f"[rank{rank}]: ", True

    def write(self, text: str) -> int:
        """Write text, with the rank as prefix of every line that begins in it."""
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
    """Prefix every line that this process prints from now on with the rank."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and not isinstance(stream, RankStream):
            stream.flush()
            setattr(sys, name, RankStream(stream, rank))


def run_script(parent: Parent) -> None:
    """Run the script with its arguments, as Python itself would."""
    sys.argv = sys.argv[1:]
    script = sys.argv[0]
    if int(os.environ["WORLD_SIZE"]) > 1:
        name_lines(int(os.environ["RANK"]))
    # As Python does for a script; `runpy.run_path` does not.
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RunError(f"{script} ended with code {end.code}") from None
    except Exception as error:
        if lost_another(error):
            raise CommunicationError(f"lost another rank: {error}") from error
        # The traceback shows the script's own lines, not ours.
        traceback.print_exc()
        raise


if __name__ == "__main__":
    live(run_script)
