"""Communication of front end and workers: inputs in shared memory, short messages over sockets.

An input is written once, into a slot of memory that all workers map. A message of a few bytes over
a worker's own socket (which keeps message boundaries) wakes the worker, and it answers over the
same socket. The head of the memory contains the number of the last finished request, so that a late
worker skips requests whose answers are no longer needed.
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
"""Number of a request and the slot of its input."""
ANSWER = struct.Struct("<QQ")
"""Number of a request and nanoseconds of computing; the outputs follow as float32."""
READY = 0
"""Number with which a worker reports that it is ready."""


@dataclass(frozen=True)
class InputLayout:
    """Position of the inputs in the shared memory."""

    shape: tuple[int, ...]
    """Shape of one input, without the batch dimension."""
    dtype: str

    @property
    def input_bytes(self) -> int:
        """Bytes of one input."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of the shared memory."""
        return _HEAD_BYTES + SLOTS * self._stride

    @property
    def _stride(self) -> int:
        # Slots do not share a cache line, and vector loads are aligned.
        return -(-self.input_bytes // _ALIGN_BYTES) * _ALIGN_BYTES

    def slots(self, memory: mmap.mmap) -> list[np.ndarray[Any, Any]]:
        """Views of the slots, each a batch of one."""
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
        """Convert an input to a batch that parts accept; raises `UsageError` if it is invalid."""
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
    """Mark a request and all before it as finished; workers skip them."""
    _FINISHED.pack_into(memory, 0, number)


def finished(memory: mmap.mmap) -> int:
    """Number of the last finished request."""
    return int(_FINISHED.unpack_from(memory, 0)[0])
