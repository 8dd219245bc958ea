"""Memory of the host beside a device, and copies between both that run beside the computation.

On CUDA each direction has a stream of its own and the host's side is page-locked, so that both
directions and the computation overlap. A copy gives a `Ticket`: the computation waits for it on the
device, a thread of the host waits for it on the host. On a processor the "device" is other memory
of the same kind, copies are done when they are asked for, and everything else is the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch

from hocket.base.errors import RunError
from hocket.base.units import format_bytes
from hocket.runtime.offload.memory_tracker import on_host

Pair = tuple[torch.Tensor, torch.Tensor]
"""Where a copy goes, and where it comes from."""


def looking(
    buffer: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
    offset: int,
) -> torch.Tensor:
    """A tensor that looks at a buffer of bytes; the offset is in elements."""
    return whole_numbers(buffer, dtype).as_strided(shape, stride, offset)


def extent(tensor: torch.Tensor) -> int:
    """Elements of memory from the tensor's first to its last, gaps of its layout included."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0


def whole_numbers(buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A buffer of bytes as numbers, as many as there are whole ones."""
    num_bytes = buffer.numel() // dtype.itemsize * dtype.itemsize
    return (buffer if num_bytes == buffer.numel() else buffer[:num_bytes]).view(dtype)


def host_buffer(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Bytes of the host; ``pinned`` ones can be copied from and to a GPU beside everything else.

    They are locked in place after all cores have touched them: the allocator of PyTorch would round
    their size up to a power of two, and touch them with one core.
    """
    with on_host():
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if pinned and num_bytes:
            buffer.zero_()
            _lock(buffer)
    return buffer


def _lock(buffer: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = buffer.data_ptr()
    code = int(runtime.cudaHostRegister(address, buffer.numel(), 0))
    if code:
        raise RunError(
            f"the host does not lock {format_bytes(buffer.numel())} in place (CUDA error {code})",
            hint="give the process more lockable memory (ulimit -l), or train a smaller model",
        )
    weakref.finalize(buffer.untyped_storage(), runtime.cudaHostUnregister, address)


class HostPool:
    """Buffers of the host by size, used again: locking one takes milliseconds."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = {}
        self.num_bytes = 0
        """Of all buffers that were ever made."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """A buffer of this size."""
        if free := self._free.get(num_bytes):
            return free.pop()
        self.num_bytes += num_bytes
        return host_buffer(num_bytes, pinned=self._pinned)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Nobody reads or writes it any more."""
        self._free.setdefault(buffer.numel(), []).append(buffer)


class Ticket:
    """A copy under way."""

    def __init__(self, event: torch.cuda.Event | None) -> None:
        self._event = event

    def wait(self) -> None:
        """Have the computation wait for it; this thread goes on."""
        if self._event is not None:
            self._event.wait()

    @property
    def is_done(self) -> bool:
        """True if all bytes are there by now."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        """Have this thread wait for it."""
        if self._event is not None:
            self._event.synchronize()


DONE = Ticket(None)


class Lent:
    """Tensors that something beside the computation reads: they are dropped when it has ended."""

    def __init__(self) -> None:
        self._ticket, self._tensors = DONE, list[torch.Tensor]()

    def take_back(self) -> None:
        """Have the computation wait for the end before it takes their place."""
        self._ticket.wait()
        self._ticket, self._tensors = DONE, []

    def lend(self, tensors: Sequence[torch.Tensor], ticket: Ticket) -> None:
        """Others in place of those before."""
        self.take_back()
        self._ticket, self._tensors = ticket, list(tensors)


class CopyEngines:
    """Both directions between a device and the host."""

    def __init__(self, device: torch.device, *, is_real: bool, is_idle: bool = False) -> None:
        """``is_real`` says whether there is a device beside the host, with streams; an idle one
        copies nothing: for rehearsals."""
        self.device, self.is_real, self._is_idle = device, is_real, is_idle
        self._out = torch.cuda.Stream(device) if self.is_real else None  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device) if self.is_real else None  # type: ignore[no-untyped-call]

    def mark(self) -> Ticket:
        """What the computation was told so far."""
        if not self.is_real:
            return DONE
        return Ticket(torch.cuda.current_stream(self.device).record_event())

    def synchronize(self) -> None:
        """Have this thread wait for all that the device was told, in whatever order."""
        if self.is_real:
            torch.cuda.synchronize(self.device)

    def send(self, pairs: Sequence[Pair]) -> Ticket:
        """Copy to the host what the computation was told to make."""
        return self._copy(pairs, self._out, self.mark())

    def fetch(self, pairs: Sequence[Pair], *after: Ticket) -> Ticket:
        """Copy to the device, after what is told; else when the computation has come to here."""
        return self._copy(pairs, self._in, *(after or (self.mark(),)))

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """What is asked here the device does beside the computation, in turn with what is sent."""
        with nullcontext() if self._out is None else torch.cuda.stream(self._out):
            yield

    @torch.no_grad()
    def _copy(
        self, pairs: Sequence[Pair], stream: torch.cuda.Stream | None, *after: Ticket
    ) -> Ticket:
        if stream is None:
            for target, source in () if self._is_idle else pairs:
                target.copy_(source)
            return DONE
        with torch.cuda.stream(stream):
            for ticket in after:
                ticket.wait()
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return Ticket(stream.record_event())
