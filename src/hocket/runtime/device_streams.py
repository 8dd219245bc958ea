"""One logical device inside one process: a CPU, or a stream of a CUDA device.

Several logical devices may share one real one; then their streams share it. Marks are points in
time: the host's clock for CPUs, events on the stream for CUDA, converted to seconds when the step
is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Packing = Callable[[torch.Tensor], torch.Tensor]


class DeviceStream:
    """A logical device on the CPU: everything happens when it is called."""

    is_cuda = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def settle(self) -> None:
        """Wait for everything that was launched before the step, on any stream."""

    def begin(self) -> None:
        """Start a step."""

    def mark(self) -> Any:
        """Return a mark at this point of the device's work."""
        return time.perf_counter()

    def seconds(self, mark: Any) -> float:
        """Convert a mark to seconds of the host's clock; only after `finish`."""
        return float(mark)

    def make_current(self) -> None:
        """Run the next calls on this device."""

    def release_current(self) -> None:
        """End what `make_current` began."""

    def wait(self, event: Any) -> None:
        """Let later work wait for ``event``, which may be None."""
        if event is not None:
            event.synchronize()

    def event(self) -> Any:
        """Return an event after everything launched so far."""
        return None

    def finish(self) -> None:
        """Wait until everything is done."""


class CudaStream(DeviceStream):
    """A logical device on a CUDA device, with a compute stream of its own."""

    is_cuda = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._base = _timed_event()
        self._base_s = 0.0

    def settle(self) -> None:
        """Wait for everything that was launched before the step, on any stream."""
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)

    def begin(self) -> None:
        """Start a step."""
        self._base.record(self.stream)
        self.stream.synchronize()
        self._base_s = time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """An event behind all that was launched so far."""
        event = _timed_event()
        event.record(self.stream)
        return event

    def seconds(self, mark: Any) -> float:
        """A mark in seconds of the host's clock."""
        if isinstance(mark, float):
            return mark
        return self._base_s + float(self._base.elapsed_time(mark)) / 1e3

    def make_current(self) -> None:
        """Launch the next calls on the compute stream."""
        torch.cuda.set_stream(self.stream)

    def release_current(self) -> None:
        """Return to the default stream."""
        torch.cuda.set_stream(torch.cuda.default_stream(self.device))

    def wait(self, event: Any) -> None:
        """Let the compute stream wait for ``event``."""
        if event is not None:
            self.stream.wait_event(event)

    def event(self) -> torch.cuda.Event:
        """An event behind all that was launched so far, without a time."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def finish(self) -> None:
        """Wait until the compute stream is empty."""
        self.stream.synchronize()


def _timed_event() -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


def new_stream(device: torch.device) -> DeviceStream:
    """The stream of a real device."""
    return CudaStream(device) if device.type == "cuda" else DeviceStream(device)


class Channel:
    """The connection between two logical devices; between CUDA devices, a stream at each end."""

    def __init__(self, src: DeviceStream, dst: DeviceStream) -> None:
        self.src, self.dst = src, dst
        if src.is_cuda and dst.is_cuda:
            self._send = torch.cuda.Stream(src.device)  # type: ignore[no-untyped-call]
            self._receive = self._send
            if src.device != dst.device:
                self._receive = torch.cuda.Stream(dst.device)  # type: ignore[no-untyped-call]

    def copy_on_host(self, data: torch.Tensor) -> Arrival:
        """Copy a tensor within the host's memory."""
        now_s = time.perf_counter()
        return Arrival(data.clone(), None, now_s, now_s)

    def copy(self, value: torch.Tensor, packed: Packing, produced: Any) -> Arrival:
        """Copy ``packed(value)`` once the event ``produced`` is reached."""
        if self.src.is_cuda and self.dst.is_cuda:
            return self._copy_on_streams(value, packed, produced)
        if produced is not None:
            produced.synchronize()
        began_s = time.perf_counter()
        arrived = packed(value).to(self.dst.device, copy=True)
        return Arrival(arrived, None, began_s, time.perf_counter())

    def _copy_on_streams(self, value: torch.Tensor, packed: Packing, produced: Any) -> Arrival:
        start, end = _timed_event(), _timed_event()
        with torch.cuda.stream(self._send):
            self._send.wait_event(produced)
            # This stream reads the tensor, also to pack it, and it may be dropped before that.
            value.record_stream(self._send)
            sent = packed(value)
            # Both streams are current, each on its device: PyTorch copies on the one and makes the
            # other wait. Memory is taken on the receiving stream, not on the compute stream, whose
            # kernels may be far behind.
            with torch.cuda.stream(self._receive):
                self._receive.wait_stream(self._send)
                start.record(self._receive)
                arrived = torch.empty(sent.shape, dtype=sent.dtype, device=self.dst.device)
                arrived.copy_(sent, non_blocking=True)
                end.record(self._receive)
        return Arrival(arrived, end, start, end)


class Arrival(NamedTuple):
    """A copy in flight."""

    data: torch.Tensor
    event: Any
    """Reached when all bytes are there; None where they already are."""
    start: Any
    """Marks around the copy, in the time of the device that receives."""
    end: Any
