"""Execute one rank's tables of a planned collective: a C loop over non-blocking sockets.

Python would allocate several objects per message, which is too slow for fast links. Therefore
``tree_executor.c`` is compiled at first use and cached on disk; this file passes it the arrays of a
rank's tables, sockets and data.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from hocket.base import config
from hocket.base.arrays import pointers
from hocket.base.errors import MissingExtraError
from hocket.runtime.collectives.rank_tables import ADDABLE, RankTables


class RunState(IntEnum):
    """Result of one call of `TreeRun.advance`."""

    DONE = 0
    RUNNING = 1
    CLOSED = 2
    """The peer ``failed_peer`` closed its connection."""
    MISMATCH = 3
    """The peer ``failed_peer`` runs a different collective."""


class Connections:
    """State that outlives a collective: sockets of the peers, and headers received early."""

    def __init__(self, descriptors: list[int]) -> None:
        count = len(descriptors)
        self.fd = np.array(descriptors, dtype=np.int64)
        self.in_header = np.zeros((count, 2), dtype=np.uint32)
        self.in_header_done = np.zeros(count, dtype=np.int64)
        self.in_body_done = np.zeros(count, dtype=np.int64)
        self.has_left = np.zeros(count, dtype=np.uint8)
        """True for peers that have closed their end."""
        self.bytes_out, self.bytes_in = np.zeros((2, count), dtype=np.int64)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def close(self) -> None:
        """Close the wake-up descriptor; the sockets belong to the caller."""
        os.close(self.wake_fd)


class TreeRun:
    """One collective of one rank in progress."""

    def __init__(
        self,
        tables: RankTables,
        connections: Connections,
        data: np.ndarray[Any, Any],
        *,
        sequence: int,
        notify_fd: int = -1,
        is_ready: bool = True,
    ) -> None:
        """``data`` is changed in place; without ``is_ready`` chunks are sent only after `ready`."""
        count, chunks = len(connections.fd), tables.num_chunks
        self.tables, self.connections = tables, connections
        self.data = data.view(np.uint8).reshape(-1)
        # NumPy has no bfloat16, so its bits are passed as uint16, which is no other sum's dtype.
        name = "bfloat16" if data.dtype == np.uint16 else data.dtype.name
        self.kind = ADDABLE.index(name) if name in ADDABLE else -1
        # The sequence number detects late ranks; the fingerprint detects different messages.
        self.sequence = (sequence & 0xFFFF) << 16 | _fingerprint(tables, self.kind)
        self.notify_fd = notify_fd
        self.scratch = np.empty(tables.num_scratch_bytes, dtype=np.uint8)
        self.ready_queue = np.zeros(max(chunks, 1), dtype=np.int64)
        self.own, self.final = np.zeros((2, chunks), dtype=np.uint8)
        self.added = np.zeros(chunks, dtype=np.int64)
        self.arrived = np.zeros(chunks, dtype=np.uint64)
        sends = tables.sends_to(count)
        self.heap_ptr = pointers(sends)
        self.heap_item = np.zeros(int(sends.sum()) + 1, dtype=np.int64)
        self.heap_size, self.out_done = np.zeros((2, count), dtype=np.int64)
        self.out_item = np.full(count, -1, dtype=np.int64)
        self.pending_in = tables.receives_from(count)
        # Arrays of one number, because C code writes to them. `ready` changes ``num_ready`` on
        # another thread while C code reads it.
        self.num_ready, self.num_accepted, self.num_finals, self.num_sends, self.failed_peer = (
            np.zeros((5, 1), dtype=np.int64)
        )
        self._function, self._struct = compiled(), self._pointers()
        if is_ready:
            self.ready_queue[: len(tables.own)] = tables.own
            self.num_ready[0] = len(tables.own)

    def ready(self, chunk: int) -> None:
        """Announce that the data now contains this rank's contribution to a chunk."""
        # Entry before count: the C thread reads the entries below the count.
        self.ready_queue[self.num_ready[0]] = chunk
        self.num_ready[0] += 1
        os.eventfd_write(self.connections.wake_fd, 1)

    def advance(self, slice_s: float) -> RunState:
        """Run until all chunks are done, or for ``slice_s`` seconds."""
        return RunState(self._function(self._struct, slice_s))

    @property
    def num_moved(self) -> int:
        """Bytes sent and received over all connections so far; it grows while there is progress."""
        return int(self.connections.bytes_out.sum() + self.connections.bytes_in.sum())

    def _pointers(self) -> _Struct:
        scalars = {
            "num_ranks": len(self.connections.fd), "num_chunks": self.tables.num_chunks,
            "kind": self.kind, "sequence": self.sequence, "wake_fd": self.connections.wake_fd,
            "notify_fd": self.notify_fd, "wanted_finals": self.tables.wanted_finals,
            "wanted_sends": self.tables.wanted_sends, "last_chunk": self.tables.last_chunk,
        }  # fmt: skip
        owners = (self, self.tables, self.connections)
        arrays = {
            name: next(getattr(part, name) for part in owners if hasattr(part, name)).ctypes.data
            for name in _ARRAYS
        }
        return _Struct(**scalars, **arrays)


def _fingerprint(tables: RankTables, kind: int) -> int:
    """Return a 16-bit checksum of chunks and dtype, which ranks of one collective share."""
    found = kind + 1
    for table in (tables.chunk_tree, tables.chunk_start, tables.chunk_size):
        found = crc32(table.tobytes(), found)
    return found & 0xFFFF


_SCALARS = ("num_ranks", "num_chunks", "kind", "sequence", "wake_fd", "notify_fd", "wanted_finals",
            "wanted_sends", "last_chunk")  # fmt: skip
_ARRAYS = (
    "fd", "chunk_tree", "chunk_start", "chunk_size", "chunk_at", "up_parent", "up_ptr", "up_child",
    "scratch_at", "down_parent", "down_ptr", "down_child", "ready_queue", "num_ready",
    "num_accepted", "own", "final", "added", "arrived", "heap_ptr", "heap_size", "heap_item",
    "out_item", "out_done", "pending_in", "has_left", "in_header", "in_header_done",
    "in_body_done", "num_finals", "num_sends", "bytes_out", "bytes_in", "failed_peer", "data",
    "scratch",
)  # fmt: skip
"""Fields in the order of the struct in ``tree_executor.c``."""


class _Struct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _SCALARS),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    ]


@cache
def compiled() -> Any:
    """Return the function of ``tree_executor.c``; raises if it cannot be compiled."""
    source = Path(__file__).with_name("tree_executor.c")
    # A changed source or another CPU architecture needs another library file.
    digest = hashlib.sha256(source.read_bytes() + os.uname().machine.encode()).hexdigest()[:16]
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = config.cache_folder() or Path(temporary)
            path = folder / f"tree-executor-{digest}.so"
            if not path.exists():
                _compile(source, path)
            function = ctypes.CDLL(str(path)).run_trees
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingExtraError(
            f"planned collectives need a C compiler: {error}",
            hint="install gcc, or use gloo: plan without trees or priorities",
        ) from error
    function.argtypes, function.restype = (ctypes.POINTER(_Struct), ctypes.c_double), ctypes.c_int
    return function


def _compile(source: Path, path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or "cc"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as made:
        new = Path(made) / path.name
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(new), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        # Ranks compile at the same time; an atomic rename ensures that each loads a complete file.
        new.replace(path)
