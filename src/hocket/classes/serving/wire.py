"""Slots for inputs in shared memory, and short messages over sockets, of front end and workers.

An input is written once, into a slot that all workers map; a worker is woken by a few bytes over
its own socket (whole messages, never parts) and answers over it. The head of the memory holds the
number of the last request that was answered, so that a late worker skips what nobody waits for.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from hocket.base.errors import UsageError

SLOTS = 16
_HEAD_BYTES = 64
_ALIGN_BYTES = 64
_FINISHED = struct.Struct("<Q")
WAKE = struct.Struct("<QI")
"""Number of a request and its slot."""
ANSWER = struct.Struct("<QQ")
"""Number of a request and the nanoseconds of computing; the outputs follow as float32."""
READY = 0
"""The number that a worker answers with when it can begin."""


@dataclass(frozen=True)
class InputLayout:
    """Position of the inputs in the shared memory."""

    shape: tuple[int, ...]
    """Of one input, without its batch."""
    dtype: str

    @property
    def input_bytes(self) -> int:
        """Of one input."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def total_bytes(self) -> int:
        """Of the whole memory."""
        return _HEAD_BYTES + SLOTS * self._stride

    @property
    def _stride(self) -> int:
        return -(-self.input_bytes // _ALIGN_BYTES) * _ALIGN_BYTES

    def slots(self, memory: mmap.mmap) -> list[np.ndarray[Any, Any]]:
        """Each slot as a batch of one."""
        return [
            np.frombuffer(
                memory,
                dtype=self.dtype,
                count=math.prod(self.shape),
                offset=_HEAD_BYTES + slot * self._stride,
            ).reshape(1, *self.shape)
            for slot in range(SLOTS)
        ]

    def checked(self, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """An input as a batch that parts take; raises `UsageError` for anything else."""
        given = np.asarray(inputs)
        shape = self.shape
        if given.shape not in (shape, (1, *shape)):
            raise UsageError(f"the input has the shape {given.shape}", hint=f"expected {shape}")
        if given.dtype.kind not in "fiub":
            raise UsageError(f"the input has the type {given.dtype}", hint="expected numbers")
        if given.dtype.kind == "f" and not np.isfinite(given).all():
            raise UsageError("the input holds NaN or infinity", hint="send finite numbers")
        if self.dtype == "int64" and given.dtype.kind == "f":
            raise UsageError("the input holds fractions", hint="expected whole numbers (tokens)")
        with np.errstate(over="ignore"):
            cast = given.reshape(1, *shape).astype(self.dtype)
        if cast.dtype.kind == "f" and not np.isfinite(cast).all():
            raise UsageError("the input holds numbers beyond float32", hint="scale it")
        return cast


def set_finished(memory: mmap.mmap, number: int) -> None:
    """Say that nobody waits for a request any more, nor for those before it."""
    _FINISHED.pack_into(memory, 0, number)


def finished(memory: mmap.mmap) -> int:
    """The last request that nobody waits for."""
    return int(_FINISHED.unpack_from(memory, 0)[0])
