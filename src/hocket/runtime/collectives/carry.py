"""Carrying out one rank's tables: in compiled code where a C compiler is there, else in Python."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from hocket.base import config
from hocket.base.arrays import pointers
from hocket.runtime.collectives.layout import KINDS, RankLayout


class CarryState(IntEnum):
    """How a call of the carrying code ended."""

    DONE = 0
    GOES_ON = 1
    CLOSED = 2
    """By the peer ``who``."""
    GARBLED = 3


class Connections:
    """What outlives a collective: descriptors of the peers, and headers that came early."""

    def __init__(self, descriptors: list[int]) -> None:
        count = len(descriptors)
        self.fd = np.array(descriptors, dtype=np.int64)
        self.in_header = np.zeros((count, 2), dtype=np.uint32)
        self.in_header_done = np.zeros(count, dtype=np.int64)
        self.in_body_done = np.zeros(count, dtype=np.int64)
        self.has_left = np.zeros(count, dtype=np.uint8)
        """Whether a peer has closed its end."""
        self.bytes_out, self.bytes_in = np.zeros((2, count), dtype=np.int64)
        self.busy_s = np.zeros(count)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def close(self) -> None:
        """Let go of what is not the sockets' own."""
        os.close(self.wake_fd)


class Carry:
    """One collective of one rank under way."""

    def __init__(
        self,
        layout: RankLayout,
        connections: Connections,
        data: np.ndarray[Any, Any],
        *,
        sequence: int,
        note_fd: int = -1,
        is_ready: bool = True,
        in_python: bool = False,
    ) -> None:
        """``data`` is changed in place; without ``is_ready`` chunks wait for `ready`.

        ``in_python`` also where compiled code is there: the bytes on the wire are the same.
        """
        count, chunks = len(connections.fd), layout.num_chunks
        self.layout, self.connections = layout, connections
        self.data = data.view(np.uint8).reshape(-1)
        # NumPy has no bfloat16: its bits come as whole numbers of two bytes, which nobody adds.
        name = "bfloat16" if data.dtype == np.uint16 else data.dtype.name
        self.kind = KINDS.index(name) if name in KINDS else -1
        # Ranks that cut another message into other chunks are told from those that come late.
        self.sequence = (sequence & 0xFFFF) << 16 | _fingerprint(layout, self.kind)
        self.note_fd = note_fd
        self.wanted_sends, self.wanted_finals = layout.wanted_sends, layout.wanted_finals
        self.scratch = np.empty(layout.num_scratch_bytes, dtype=np.uint8)
        self.ready_queue = np.zeros(max(chunks, 1), dtype=np.int64)
        self.num_ready, self.num_taken = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        self.own, self.final = np.zeros(chunks, dtype=np.uint8), np.zeros(chunks, dtype=np.uint8)
        self.added = np.zeros(chunks, dtype=np.int64)
        self.arrived = np.zeros(chunks, dtype=np.uint64)
        sends = layout.sends_to(count)
        self.heap_ptr = pointers(sends)
        self.heap_size = np.zeros(count, dtype=np.int64)
        self.heap_item = np.zeros(int(sends.sum()) + 1, dtype=np.int64)
        self.out_item = np.full(count, -1, dtype=np.int64)
        self.out_done = np.zeros(count, dtype=np.int64)
        self.left_in = layout.receives_from(count)
        self.num_finals, self.num_sends = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
        self.who = np.full(1, -1, dtype=np.int64)
        known = None if in_python else compiled()
        self._call: Callable[[Carry, float], int] = known or _in_python
        self._held: Any = None
        if is_ready:
            self.ready_queue[: len(layout.own)] = layout.own
            self.num_ready[0] = len(layout.own)

    def ready(self, chunk: int) -> None:
        """This rank's contribution to a chunk is in the data now."""
        self.ready_queue[self.num_ready[0]] = chunk
        self.num_ready[0] += 1
        os.eventfd_write(self.connections.wake_fd, 1)

    def go_on(self, slice_s: float) -> CarryState:
        """Work until all is done, or for a slice of time."""
        return CarryState(self._call(self, slice_s))

    @property
    def num_moved(self) -> int:
        """Grows while there is progress."""
        return int(self.connections.bytes_out.sum() + self.connections.bytes_in.sum())


def _fingerprint(layout: RankLayout, kind: int) -> int:
    """Sixteen bits that are the same for all ranks of one collective."""
    found = kind + 1
    for table in (layout.chunk_tree, layout.chunk_start, layout.chunk_size):
        found = crc32(table.tobytes(), found)
    return found & 0xFFFF


_SCALARS = ("num_ranks", "num_chunks", "kind", "sequence", "wake_fd", "note_fd", "wanted_finals",
            "wanted_sends", "last_chunk")  # fmt: skip
_ARRAYS = (
    "fd", "chunk_tree", "chunk_start", "chunk_size", "chunk_at", "up_parent", "up_ptr", "up_child",
    "scratch_at", "down_parent", "down_ptr", "down_child", "ready_queue", "num_ready", "num_taken",
    "own", "final", "added", "arrived", "heap_ptr", "heap_size", "heap_item", "out_item",
    "out_done", "left_in", "has_left", "in_header", "in_header_done", "in_body_done", "num_finals",
    "num_sends", "bytes_out", "bytes_in", "who", "busy_s", "data", "scratch",
)  # fmt: skip
"""In the order of the struct in ``carry.c``."""


class _Struct(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in _SCALARS),
        *((name, ctypes.c_void_p) for name in _ARRAYS),
    ]


@cache
def compiled() -> Callable[[Carry, float], int] | None:
    """The call into ``carry.c``; None where it cannot be compiled."""
    library = _library()
    if library is None:
        return None
    function = library.carry
    function.argtypes, function.restype = (ctypes.POINTER(_Struct), ctypes.c_double), ctypes.c_int

    def call(carry: Carry, slice_s: float) -> int:
        if carry._held is None:
            carry._held = _struct(carry)
        return int(function(carry._held, slice_s))

    return call


def _struct(carry: Carry) -> _Struct:
    scalars = {
        "num_ranks": len(carry.connections.fd), "num_chunks": carry.layout.num_chunks,
        "kind": carry.kind, "sequence": carry.sequence, "wake_fd": carry.connections.wake_fd,
        "note_fd": carry.note_fd, "wanted_finals": carry.wanted_finals,
        "wanted_sends": carry.wanted_sends, "last_chunk": carry.layout.last_chunk,
    }  # fmt: skip
    arrays = {}
    for name in _ARRAYS:
        owner = next(
            part for part in (carry, carry.layout, carry.connections) if hasattr(part, name)
        )
        array = getattr(owner, name)
        if owner is carry.layout:
            array = np.ascontiguousarray(array, dtype=np.int64)
            object.__setattr__(carry.layout, name, array)
        arrays[name] = array.ctypes.data
    return _Struct(**scalars, **arrays)


def _library() -> ctypes.CDLL | None:
    """``carry.c`` compiled, kept in the cache folder under its hash."""
    source = Path(__file__).with_name("carry.c")
    compiler, folder = shutil.which("cc") or shutil.which("gcc"), config.cache_folder()
    if folder is None or not hasattr(os, "eventfd"):
        return None
    digest = hashlib.sha256(source.read_bytes() + os.uname().machine.encode()).hexdigest()[:16]
    path = folder / f"carry-{digest}.so"
    try:
        if not path.exists():
            if compiler is None:
                return None
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as made:
                new = Path(made) / "carry.so"
                command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(new), str(source)]
                subprocess.run(command, check=True, capture_output=True, timeout=60)
                new.replace(path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError):
        return None


def _in_python(carry: Carry, slice_s: float) -> int:
    from hocket.runtime.collectives.plain import go_on

    return go_on(carry, slice_s)
