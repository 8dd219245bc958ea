"""Inside a machine: rings in shared memory, one for each client, shard and direction.

A ring is a file that both sides map, in a folder that is best in ``/dev/shm``. One side only writes
bytes and the end, the other only the beginning, and positions change after the bytes: a process
that is killed leaves whole pieces behind, never a part of one. What does not fit waits with the
sender. Long messages go in pieces, the first of which is marked: what a killed process had begun
is left out. All of a ring is set aside when it is made, since a write to memory that is not there
kills. The order of writes is that of x86 processors; who waits looks at the rings again and again,
every 50 microseconds at first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
import threading
import time
from collections import deque
from pathlib import Path
from typing import IO

from hocket.base.errors import RunError
from hocket.base.locks import try_lock

_MIN_RING_BYTES, _MAX_RING_BYTES = 256 * 2**10, 8 * 2**20
_ALL_RINGS_BYTES = 128 * 2**20
"""Of all clients and shards together, as far as the shortest ring allows."""
_HEAD_BYTES = 128
_FIRST, _HAS_MORE = 1, 2
"""Marks of a piece, below its length."""
_WRITTEN, _READ = 0, 64
"""Where the counts of bytes written and read stand: far apart, for one writer each."""
_SHORTEST_S, _LONGEST_S = 50e-6, 1e-3


def ring_bytes(num_shards: int, num_clients: int) -> int:
    """How long the rings between so many are; both sides must agree."""
    share = _ALL_RINGS_BYTES // (2 * num_shards * num_clients)
    return min(max(share & ~63, _MIN_RING_BYTES), _MAX_RING_BYTES)


class Ring:
    """Messages from one process to another."""

    def __init__(self, path: Path, ring_bytes: int) -> None:
        size = _HEAD_BYTES + ring_bytes
        try:
            self._map = _mapped(path, size)
        except OSError as error:
            raise RunError(
                f"no ring of {size // 2**10} KiB in shared memory: {error.strerror}",
                hint="use a folder that you may write to and that has room for two rings "
                "for each client and shard",
                where=str(path),
            ) from None
        self._bytes = ring_bytes
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._parts: list[bytes] = []
        self._is_within = False
        """Whether the beginning of the message that is being read was there."""

    def _position(self, place: int) -> int:
        # In the machine's own form: any other is copied byte by byte, and the other side, or one
        # who comes after a killed process, would see half of a position.
        found: int = struct.unpack_from("q", self._map, place)[0]
        return found

    def _move(self, place: int, position: int) -> None:
        struct.pack_into("q", self._map, place, position)

    def send(self, data: bytes) -> None:
        """Write a message, or keep what does not fit."""
        longest = self._bytes // 4
        for start in range(0, max(len(data), 1), longest):
            marks = _FIRST * (start == 0) + _HAS_MORE * (start + longest < len(data))
            self._waiting.append((data[start : start + longest], marks))
        self.push()

    def push(self) -> None:
        """Write what has been waiting, as far as there is room."""
        while self._waiting:
            piece, marks = self._waiting[0]
            written = self._position(_WRITTEN)
            if written + 8 + len(piece) - self._position(_READ) > self._bytes:
                return
            self._write(written, struct.pack("<q", len(piece) << 2 | marks) + piece)
            self._move(_WRITTEN, written + 8 + len(piece))
            self._waiting.popleft()

    def _write(self, position: int, data: bytes) -> None:
        start = position % self._bytes
        first = min(len(data), self._bytes - start)
        self._map[_HEAD_BYTES + start : _HEAD_BYTES + start + first] = data[:first]
        self._map[_HEAD_BYTES : _HEAD_BYTES + len(data) - first] = data[first:]

    def _read(self, position: int, length: int) -> bytes:
        start = position % self._bytes
        first = min(length, self._bytes - start)
        data = self._map[_HEAD_BYTES + start : _HEAD_BYTES + start + first]
        return data + self._map[_HEAD_BYTES : _HEAD_BYTES + length - first]

    @property
    def has_message(self) -> bool:
        """Whether something is to be read."""
        return self._position(_WRITTEN) > self._position(_READ)

    def receive(self) -> bytes | None:
        """The next whole message."""
        while self.has_message:
            position = self._position(_READ)
            (word,) = struct.unpack("<q", self._read(position, 8))
            length, end = word >> 2, position + 8 + (word >> 2)
            if position < 0 or length < 0 or end > self._position(_WRITTEN):
                raise RunError("a ring in shared memory was written to by something else")
            piece = self._read(position + 8, length)
            self._move(_READ, end)
            if word & _FIRST:
                self._parts, self._is_within = [], True
            if not self._is_within:
                continue
            self._parts.append(piece)
            if not word & _HAS_MORE:
                whole, self._parts, self._is_within = b"".join(self._parts), [], False
                return whole
        return None

    def close(self) -> None:
        """Unmap the ring; its file stays for who comes after."""
        self._map.close()


def _mapped(path: Path, size: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size not in (0, size):
            raise RunError("is no ring of this size", where=str(path))
        os.posix_fallocate(descriptor, 0, size)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


class MemoryPort:
    """The port of a shard or of a client; nobody else may be it at the same time."""

    def __init__(
        self, lock: IO[bytes], incoming: list[Ring], outgoing: list[Ring], address: str = ""
    ) -> None:
        self.address, self.process = address, secrets.randbits(62) + 1
        self._lock, self._incoming, self._outgoing = lock, incoming, outgoing
        self._woken = threading.Event()
        self._next = 0

    def send(self, peer: int, data: bytes, process: int = 0) -> None:
        """Write a message to a peer's ring."""
        self._outgoing[peer].send(data)

    def receive(self) -> tuple[int, bytes] | None:
        """The next message, of each peer in turn."""
        for ring in self._outgoing:
            ring.push()
        count = len(self._incoming)
        for peer in (*range(self._next, count), *range(self._next)):
            data = self._incoming[peer].receive()
            if data is not None:
                self._next = (peer + 1) % count
                return peer, data
        return None

    def wait(self, timeout_s: float) -> None:
        """Until a message is there."""
        end_s, pause_s = time.monotonic() + timeout_s, _SHORTEST_S
        while not any(ring.has_message for ring in self._incoming):
            if self._woken.wait(pause_s) or time.monotonic() > end_s:
                break
            pause_s = min(2 * pause_s, _LONGEST_S)
        self._woken.clear()

    def wake(self) -> None:
        """End a wait."""
        self._woken.set()

    def close(self) -> None:
        """Unmap all rings."""
        for ring in (*self._incoming, *self._outgoing):
            ring.close()
        self._lock.close()


def memory_shard_port(folder: Path, shard: int, num_shards: int, num_clients: int) -> MemoryPort:
    """The port of a shard for the clients of this machine."""
    lock, size = _locked(folder, f"shard {shard}"), ring_bytes(num_shards, num_clients)
    clients = range(num_clients)
    return MemoryPort(
        lock,
        [Ring(folder / f"{shard}-{client}.up", size) for client in clients],
        [Ring(folder / f"{shard}-{client}.down", size) for client in clients],
        f"shm://{folder}",
    )


def memory_client_port(folder: Path, client: int, num_shards: int, num_clients: int) -> MemoryPort:
    """The port of a client for the shards of this machine."""
    lock, size = _locked(folder, f"client {client}"), ring_bytes(num_shards, num_clients)
    shards = range(num_shards)
    return MemoryPort(
        lock,
        [Ring(folder / f"{shard}-{client}.down", size) for shard in shards],
        [Ring(folder / f"{shard}-{client}.up", size) for shard in shards],
    )


def remove_rings(folder: Path) -> None:
    """Give the memory back, when nobody will come after."""
    for pattern in ("*-*.up", "*-*.down", "* *.lock"):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _locked(folder: Path, who: str) -> IO[bytes]:
    """A lock that the kernel lets go with the process: two would read from one ring."""
    lock = open(folder / f"{who}.lock", "ab")  # noqa: SIM115
    if not try_lock(lock.fileno()):
        lock.close()
        raise RunError(
            f"another process is {who} here",
            hint="give every process a number of its own, or another folder",
            where=str(folder),
        )
    return lock
