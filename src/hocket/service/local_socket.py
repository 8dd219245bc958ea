"""A Unix socket in the state folder, from which commands of the service's own user get a token.

The kernel tells the user and process of each caller (`SO_PEERCRED`). The same user, or root, gets
the token, which exists only in the memory of the service, so no job can read it from a file.
Processes of jobs may be the same user, so a caller that descends from the supervisor of an attempt
is refused.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

from hocket.base.errors import InputFileError, RunError, system_reason
from hocket.service.executors.isolation import is_part_of_a_job

# Name of the socket in the state folder, and the longest token that is read from it.
NAME = "local.sock"
_MAX_BYTES = 1000
_TIMEOUT_S = 5.0
# Process, user and group of a caller, as the kernel reports them (``struct ucred``).
_PEER = struct.Struct("3i")
# Sent in place of a token to a caller that is refused.
_REFUSED = b"-"


class LocalSocket:
    """Listens from its creation until `close`."""

    def __init__(self, folder: Path, token: str) -> None:
        self._token = token
        self._path = folder / NAME
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with _short(folder) as place:
                self._socket.bind(place)
            os.chmod(self._path, 0o600)
            self._socket.listen(64)
        except OSError as error:
            reason = system_reason(error)
            raise InputFileError(f"cannot listen here: {reason}", where=str(self._path)) from None
        threading.Thread(target=self._open, name="fleet-socket", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections."""
        # Closing alone would leave the thread in its wait.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _open(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            with caller, contextlib.suppress(OSError):
                caller.settimeout(_TIMEOUT_S)
                caller.sendall(self._token.encode() if _may_enter(caller) else _REFUSED)


def _may_enter(caller: socket.socket) -> bool:
    data = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, user, _ = _PEER.unpack(data)
    return user in (os.geteuid(), 0) and not is_part_of_a_job(pid)


def ask_local_socket(folder: Path) -> str:
    """The token of the service of a state folder; raises `RunError` where it is refused, and
    `OSError` where nobody listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_TIMEOUT_S)
        with _short(folder) as place:
            caller.connect(place)
        data = b""
        while part := caller.recv(_MAX_BYTES):
            data += part
    if data == _REFUSED:
        raise RunError(
            "jobs of a fleet cannot command it",
            hint="give the job a token of its own: hocket fleet token add, and HOCKET_FLEET_TOKEN",
        )
    return data.decode("ascii", "replace")


@contextlib.contextmanager
def _short(folder: Path) -> Iterator[str]:
    """A path of the socket through a descriptor of its folder.

    The kernel allows about 108 characters for the path of a socket; a state folder may be deeper.
    """
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)
