"""The job of ``hocket fleet shell``: a shell on a terminal of its own, joined to a socket.

``python shell_job.py SOCKET ROWS COLUMNS [COMMAND...]``. Only the standard library is used: the job
runs this file, wherever hocket is. It ends when the shell ends or when nobody is at the other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import socket
import struct
import sys
import termios

SCRIPT = __file__
_BLOCK_BYTES = 65536


def main(path: str, rows: int, columns: int, command: list[str]) -> int:
    """Run a shell connected to the socket at ``path``; returns its exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.connect(path)
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.setdefault("TERM", "xterm")
            os.execvp(command[0], command)
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        _relay(terminal, caller)
        os.close(terminal)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGHUP)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0)


def _relay(terminal: int, caller: socket.socket) -> None:
    while True:
        ready, _, _ = select.select([terminal, caller.fileno()], [], [])
        try:
            if terminal in ready:
                data = os.read(terminal, _BLOCK_BYTES)
                if not data:
                    return
                caller.sendall(data)
            if caller.fileno() in ready:
                data = caller.recv(_BLOCK_BYTES)
                if not data:
                    return
                os.write(terminal, data)
        except OSError:
            # The shell has ended, or nobody listens any more.
            return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
