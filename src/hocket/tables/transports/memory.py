"""Inside a machine: rings in shared memory, one for each client, shard and direction.

A ring is a file that both sides map, in a folder that is best in ``/dev/shm``. One side only writes
bytes and the end, the other only the beginning, and positions change after the bytes: a process
that is killed leaves whole messages behind, never a part of one. What does not fit waits with the
sender. Long messages go in pieces. The order of writes is that of x86 processors; who waits looks
at the rings again and again, every 50 microseconds at first.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from pathlib import Path

from hocket.base.errors import RunError

RING_BYTES = 8 * 2**20
_HEAD_BYTES = 128
_WRITTEN, _READ = 0, 64
"""Where the counts of bytes written and read stand: far apart, for one writer each."""
_SHORTEST_S, _LONGEST_S = 50e-6, 1e-3


class Ring:
    """Messages from one process to another."""

    def __init__(self, path: Path, ring_bytes: int = RING_BYTES) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size not in (0, _HEAD_BYTES + ring_bytes):
                raise RunError("is no ring of this size", where=str(path))
            os.ftruncate(descriptor, _HEAD_BYTES + ring_bytes)
            self._map = mmap.mmap(descriptor, _HEAD_BYTES + ring_bytes)
        finally:
            os.close(descriptor)
        self._bytes = ring_bytes
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._parts: list[bytes] = []

    def _position(self, place: int) -> int:
        found: int = struct.unpack_from("<q", self._map, place)[0]
        return found

    def send(self, data: bytes) -> None:
        """Write a message, or keep what does not fit."""
        longest = self._bytes // 4
        for start in range(0, max(len(data), 1), longest):
            piece = data[start : start + longest]
            self._waiting.append((piece, start + longest < len(data)))
        self.push()

    def push(self) -> None:
        """Write what has been waiting, as far as there is room."""
        while self._waiting:
            piece, has_more = self._waiting[0]
            written = self._position(_WRITTEN)
            if written + 8 + len(piece) - self._position(_READ) > self._bytes:
                return
            length = -len(piece) if has_more else len(piece)
            self._write(written, struct.pack("<q", length) + piece)
            struct.pack_into("<q", self._map, _WRITTEN, written + 8 + len(piece))
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
            (length,) = struct.unpack("<q", self._read(position, 8))
            if abs(length) > self._bytes:
                raise RunError("a ring in shared memory was written to by something else")
            piece = self._read(position + 8, abs(length))
            struct.pack_into("<q", self._map, _READ, position + 8 + abs(length))
            self._parts.append(piece)
            if length >= 0:
                whole = b"".join(self._parts)
                self._parts = []
                return whole
        return None

    def close(self) -> None:
        """Unmap the ring; its file stays for who comes after."""
        self._map.close()


class MemoryPort:
    """The port of a shard or of a client."""

    def __init__(self, incoming: list[Ring], outgoing: list[Ring]) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._woken = threading.Event()
        self._next = 0

    def send(self, peer: int, data: bytes) -> None:
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


def _ring(folder: Path, shard: int, client: int, direction: str) -> Ring:
    return Ring(folder / f"{shard}-{client}.{direction}")


def memory_shard_port(folder: Path, shard: int, num_clients: int) -> MemoryPort:
    """The port of a shard for the clients of this machine."""
    clients = range(num_clients)
    return MemoryPort(
        [_ring(folder, shard, client, "up") for client in clients],
        [_ring(folder, shard, client, "down") for client in clients],
    )


def memory_client_port(folder: Path, client: int, num_shards: int) -> MemoryPort:
    """The port of a client for the shards of this machine."""
    shards = range(num_shards)
    return MemoryPort(
        [_ring(folder, shard, client, "down") for shard in shards],
        [_ring(folder, shard, client, "up") for shard in shards],
    )
