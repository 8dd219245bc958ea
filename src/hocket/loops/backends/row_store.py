"""Rows of arrays on one host, read and written in bulk by workers of others (pyzmq).

The arrays of a pass live with the caller; a worker asks for the rows of its tile in one message and
gives back those that it changed in one. Rows are raw bytes, so the bits are those of the arrays.
The caller names the tiles in an order that lets no two workers hold one row at a time. Whoever does
not know the pass's token is not answered.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hocket.base.errors import RunError
from hocket.base.extras import require

Rows = NDArray[np.int64]
AnyArray = NDArray[Any]
_READ, _WRITE = b"r", b"w"
_PATIENCE_MS = 60_000


class RowStore:
    """Serves the rows of some arrays while it is open; ``moved_bytes`` counts both ways."""

    def __init__(self, arrays: Mapping[str, AnyArray], host: str = "127.0.0.1") -> None:
        require("zmq", "rows of loops across machines")
        import zmq

        self._arrays = [_as_rows(array) for array in arrays.values()]
        self.token = secrets.token_hex(16)
        self.moved_bytes = 0
        self._socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        port: int = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="loop rows", daemon=True)

    def __enter__(self) -> RowStore:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(50):
                name, *parts = self._socket.recv_multipart()
                answer = self._answer(parts)
                if answer is not None:
                    self._socket.send_multipart([name, *answer], copy=True)

    def _answer(self, parts: Sequence[bytes]) -> list[bytes] | None:
        if len(parts) < 2 or not secrets.compare_digest(parts[0], self.token.encode()):
            return None
        self.moved_bytes += sum(map(len, parts))
        if parts[1] == _READ and len(parts) == 2 + len(self._arrays):
            wanted = [np.frombuffer(rows, np.int64) for rows in parts[2:]]
            found = [
                array[rows].tobytes() for array, rows in zip(self._arrays, wanted, strict=True)
            ]
            self.moved_bytes += sum(map(len, found))
            return found
        if parts[1] == _WRITE and len(parts) == 2 + 2 * len(self._arrays):
            for array, rows, data in zip(self._arrays, parts[2::2], parts[3::2], strict=True):
                _put(array, np.frombuffer(rows, np.int64), data)
            return [b"written"]
        return None


class RemoteRows:
    """A worker's side: arrays of the same shapes, in which rows are put and from which taken."""

    def __init__(self, address: str, token: str, arrays: Mapping[str, AnyArray]) -> None:
        import zmq

        self.names = tuple(arrays)
        self._arrays = [_as_rows(array) for array in arrays.values()]
        self._token = token.encode()
        self._socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def read(self, rows: Mapping[str, Rows]) -> None:
        """Put rows of the arrays where they belong: one question, one answer."""
        wanted = [rows[name] for name in self.names]
        answer = self._ask(_READ, [each.tobytes() for each in wanted]) if wanted else []
        for array, places, data in zip(self._arrays, wanted, answer, strict=True):
            _put(array, places, data)

    def taken(self, rows: Mapping[str, Rows]) -> list[AnyArray]:
        """What the rows hold here, to compare with later."""
        return [array[rows[name]] for name, array in zip(self.names, self._arrays, strict=True)]

    def write(self, rows: Mapping[str, Rows], before: Sequence[AnyArray]) -> None:
        """Give back the rows that are no longer what they were."""
        parts: list[bytes] = []
        for name, old, new in zip(self.names, before, self.taken(rows), strict=True):
            # Compared as bytes: a cell that became NaN or minus zero has changed too.
            changed = (old != new).any(axis=1)
            parts += [rows[name][changed].tobytes(), new[changed].tobytes()]
        if parts:
            self._ask(_WRITE, parts)

    def _ask(self, what: bytes, parts: Sequence[bytes]) -> list[bytes]:
        self._socket.send_multipart([self._token, what, *parts])
        if not self._socket.poll(_PATIENCE_MS):
            raise RunError("the caller of the loop does not answer", where="rows of a loop")
        found: list[bytes] = self._socket.recv_multipart()
        return found

    def close(self) -> None:
        """Give the connection back."""
        with contextlib.suppress(Exception):
            self._socket.close()


def _put(array: AnyArray, places: Rows, data: bytes) -> None:
    array[places] = np.frombuffer(data, np.uint8).reshape(len(places), array.shape[1])


def _as_rows(array: AnyArray) -> AnyArray:
    """The same memory as rows of bytes."""
    assert array.flags.c_contiguous
    flat = array.reshape(len(array), -1).view(np.uint8)
    return flat if flat.size else flat.reshape(len(array), 0)
