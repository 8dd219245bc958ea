"""Asynchronous copies between a device and the host, with pinned host memory.

On CUDA each direction has its own stream and host buffers are pinned, so that copies in both
directions overlap with computation. A copy returns a `CopyEvent`; a stream can wait for it without
blocking the host, and a host thread can block until it has completed. Without CUDA the "device" is
ordinary memory, and copies are synchronous. The file also has the pool of host buffers, and helpers
for typed views of byte buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from hocket.base.errors import RunError
from hocket.base.units import format_bytes
from hocket.runtime.offload.memory_tracker import on_host

CopyPair = tuple[torch.Tensor, torch.Tensor]
"""Target and source of a copy."""


def typed_view(
    buffer: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """Return a strided view of a byte buffer; the offset is in elements."""
    return as_dtype(buffer, dtype).as_strided(shape, stride, offset)


def extent(tensor: torch.Tensor) -> int:
    """Return the number of elements that a tensor spans in memory, including gaps."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0


def as_dtype(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View a byte buffer as elements of ``dtype``, without trailing bytes of an incomplete
    element."""
    num_bytes = buffer.numel() // dtype.itemsize * dtype.itemsize
    return (buffer if num_bytes == buffer.numel() else buffer[:num_bytes]).view(dtype)


def host_buffer(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate host memory; ``pinned`` memory can be copied from and to a GPU asynchronously.

    PyTorch's pinned allocator would round sizes up to a power of two and touch pages from one core.
    Here all cores touch the pages first, and the buffer is registered with CUDA afterwards.
    """
    with on_host():
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if pinned and num_bytes:
            buffer.zero_()
            _pin(buffer)
    return buffer


def _pin(buffer: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = buffer.data_ptr()
    code = int(runtime.cudaHostRegister(address, buffer.numel(), 0))
    if code:
        raise RunError(
            f"the host cannot pin {format_bytes(buffer.numel())} of memory (CUDA error {code})",
            hint="give the process more lockable memory (ulimit -l), or train a smaller model",
        )
    # CUDA must forget the pages before the operating system reuses them.
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)


class HostPool:
    """Pool of host buffers by size, reused because pinning one takes milliseconds."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = {}
        self.num_bytes = 0
        """Bytes of all buffers allocated so far."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a free buffer of this size, or a new one."""
        if free := self._free.get(num_bytes):
            return free.pop()
        self.num_bytes += num_bytes
        return host_buffer(num_bytes, pinned=self._pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer to the pool once nothing reads or writes it any more."""
        self._free.setdefault(buffer.numel(), []).append(buffer)


class CopyEvent:
    """Completion of a copy, or of all work queued on a stream so far."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Make the current stream wait for the event; the calling thread continues."""
        if self._event is not None:
            self._event.wait()

    @property
    def is_done(self) -> bool:
        """True if the event has completed."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Block the calling thread until the event has completed."""
        if self._event is not None:
            self._event.synchronize()


DONE = CopyEvent(None)


class HeldUntil:
    """References to tensors that another stream reads, held until that stream has read them."""

    def __init__(self) -> None:
        self._event, self._tensors = DONE, list[torch.Tensor]()

    def release(self) -> None:
        """Make the current stream wait for the reader, then drop the references."""
        self._event.wait()
        self._event, self._tensors = DONE, []

    def hold(self, tensors: Sequence[torch.Tensor], event: CopyEvent) -> None:
        """Release the tensors held before, and hold these until ``event``."""
        self.release()
        self._event, self._tensors = event, list(tensors)


class CopyStreams:
    """One copy stream per direction between a device and the host."""

    def __init__(self, device: torch.device, *, is_real: bool, is_dry_run: bool = False) -> None:
        """Create streams if the device has separate memory (``is_real``); a dry run copies
        nothing."""
        self.device, self.is_real, self._is_dry_run = device, is_real, is_dry_run
        self._out = torch.cuda.Stream(device) if self.is_real else None  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device) if self.is_real else None  # type: ignore[no-untyped-call]

    def record_event(self) -> CopyEvent:
        """Record an event on the current stream."""
        if not self.is_real:
            return DONE
        return CopyEvent(torch.cuda.current_stream(self.device).record_event())

    def synchronize(self) -> None:
        """Block the calling thread until the device is idle."""
        if self.is_real:
            torch.cuda.synchronize(self.device)

    def offload(self, pairs: Sequence[CopyPair]) -> CopyEvent:
        """Copy to the host after all work queued on the current stream."""
        return self._copy(pairs, self._out, self.record_event())

    def fetch(self, pairs: Sequence[CopyPair], *after: CopyEvent) -> CopyEvent:
        """Copy to the device after the events; without events, after the current stream's work."""
        return self._copy(pairs, self._in, *(after or (self.record_event(),)))

    @contextmanager
    def offload_stream(self) -> Iterator[None]:
        """Launch kernels on the stream of copies to the host, in order with the copies."""
        with nullcontext() if self._out is None else torch.cuda.stream(self._out):
            yield

    @torch.no_grad()
    def _copy(
        self, pairs: Sequence[CopyPair], stream: torch.cuda.Stream | None, *after: CopyEvent
    ) -> CopyEvent:
        if stream is None:
            for target, source in () if self._is_dry_run else pairs:
                target.copy_(source)
            return DONE
        with torch.cuda.stream(stream):
            for event in after:
                event.wait()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return CopyEvent(stream.record_event())
