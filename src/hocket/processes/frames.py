"""Frames between processes: a JSON object followed by raw buffers, whose sizes it lists.

Frames never contain code (no pickle). Reading and writing resume where they stopped, so both work
on blocking and non-blocking descriptors.
"""

from __future__ import annotations

import json
import os
import struct
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

_LENGTH = struct.Struct(">Q")
_MAX_HEADER_BYTES = 1 << 32
_MAX_PARTS = 64
"""Maximum number of buffers per ``writev`` call; Linux allows 1024."""


class Frame(NamedTuple):
    """One message: a JSON header and raw buffers."""

    header: dict[str, Any]
    buffers: list[bytearray]


class FrameReader:
    """Reads frames from a descriptor, incrementally."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_closed = False
        """True if the other side has closed its end."""
        self._frames = self._receive()

    def read(self) -> Frame | None:
        """Next frame; None if it is incomplete, or if the other side has closed (`is_closed`)."""
        return next(self._frames)

    def _receive(self) -> Generator[Frame | None, None, None]:
        while True:
            length = yield from self._filled(_LENGTH.size)
            (size,) = _LENGTH.unpack(length)
            # Text printed by accident into the pipe would be read as a huge length.
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"no frame begins with {bytes(length)!r}")
            header = json.loads((yield from self._filled(size)))
            buffers = []
            for size in header.pop("sizes"):
                buffers.append((yield from self._filled(size)))
            yield Frame(header, buffers)

    def _filled(self, size: int) -> Generator[None, None, bytearray]:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            try:
                count = os.readv(self.descriptor, [view[done:]])
            except BlockingIOError:
                yield None
                continue
            if not count:
                self.is_closed = True
                yield None
            done += count
        return data


class FrameWriter:
    """Writes frames to a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._waiting: deque[memoryview] = deque()

    @property
    def is_empty(self) -> bool:
        """True if everything has been written."""
        return not self._waiting

    def put(self, header: dict[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Queue a frame; ``buffers`` must not change until it is written."""
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        text = json.dumps({**header, "sizes": [len(view) for view in views]}).encode()
        self._waiting.append(memoryview(_LENGTH.pack(len(text)) + text))
        self._waiting.extend(view for view in views if len(view))

    def flush(self) -> None:
        """Write as much as the other side accepts now; everything on a blocking descriptor."""
        while self._waiting:
            parts = [self._waiting[i] for i in range(min(len(self._waiting), _MAX_PARTS))]
            try:
                count = os.writev(self.descriptor, parts)
            except BlockingIOError:
                return
            # A partial write may end inside any buffer: whole buffers are dropped, the next one is
            # cut.
            while self._waiting and count >= len(self._waiting[0]):
                count -= len(self._waiting.popleft())
            if count:
                self._waiting[0] = self._waiting[0][count:]
