"""Arrays in shared memory: what processes of one machine work on.

The caller's arrays are copied in before the tiles run, and those that the loop writes are copied
back after; a segment is kept for the next call of the same size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker, shared_memory
from typing import Any

import numpy as np

from hocket.loops.job import AnyArray


@dataclass(frozen=True)
class Described:
    """Where an array is, for another process."""

    segment: str
    shape: tuple[int, ...]
    dtype: str

    def as_data(self) -> list[Any]:
        """As JSON."""
        return [self.segment, list(self.shape), self.dtype]


class SharedArrays:
    """The owner's side: one segment per name."""

    def __init__(self) -> None:
        self._segments: dict[str, shared_memory.SharedMemory] = {}
        self.arrays: dict[str, AnyArray] = {}

    def put(self, name: str, array: AnyArray) -> Described:
        """Copy an array in; C order, so that every process sees the same layout."""
        size = max(array.nbytes, 1)
        segment = self._segments.get(name)
        if segment is None or segment.size < size:
            self._drop(name)
            segment = self._segments[name] = shared_memory.SharedMemory(create=True, size=size)
        shared: AnyArray = np.ndarray(array.shape, array.dtype, buffer=segment.buf)
        shared[...] = array
        self.arrays[name] = shared
        return Described(segment.name, array.shape, array.dtype.str)

    def close(self) -> None:
        """Give all memory back."""
        for name in list(self._segments):
            self._drop(name)

    def _drop(self, name: str) -> None:
        self.arrays.pop(name, None)
        segment = self._segments.pop(name, None)
        if segment is not None:
            with contextlib.suppress(BufferError):
                segment.close()
            with contextlib.suppress(FileNotFoundError):
                segment.unlink()


class AttachedArrays:
    """A worker's side: arrays by name, attached when first named."""

    def __init__(self) -> None:
        self._segments: dict[str, shared_memory.SharedMemory] = {}

    def get(self, described: list[Any]) -> AnyArray:
        """The array that the owner described."""
        name, shape, dtype = described
        if name not in self._segments:
            segment = shared_memory.SharedMemory(name)
            # The owner removes the segment; this process must not do it when it ends.
            with contextlib.suppress(Exception):
                resource_tracker.unregister(segment._name, "shared_memory")  # type: ignore[attr-defined]
            self._segments[name] = segment
        buffer = self._segments[name].buf
        found: AnyArray = np.ndarray(tuple(shape), np.dtype(dtype), buffer=buffer)
        return found


def plain_scalars(values: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Numbers as JSON, each with its type, so that a worker compiles for the same one."""
    found = {}
    for name, value in values.items():
        if not isinstance(value, np.ndarray):
            kind = np.asarray(value).dtype.str if isinstance(value, np.generic) else ""
            plain = value.item() if isinstance(value, np.generic) else value
            told = plain.hex() if isinstance(plain, float) else plain
            found[name] = [type(plain).__name__, told, kind]
    return found


def scalar_of(described: list[Any]) -> Any:
    """A number from its description, bit for bit."""
    kind, told, dtype = described
    value = float.fromhex(told) if kind == "float" else bool(told) if kind == "bool" else int(told)
    return np.dtype(dtype).type(value) if dtype else value
