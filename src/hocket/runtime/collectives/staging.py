"""Gradients of a GPU copied to pinned memory beside the backward pass.

A stream of its own copies; a thread waits for each copy and tells when its bytes are on the host.
Copies end in the order in which they were asked for.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch


class GpuStaging:
    """Copies from one GPU to the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copies: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None]
        self._copies = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="hocket staging", daemon=True)
        self._thread.start()

    def fetch(
        self, into: torch.Tensor, gradient: torch.Tensor | None, on_host: Callable[[], None]
    ) -> None:
        """Copy a gradient into pinned memory, zeros without one, and call when it is there."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            source = torch.zeros_like(into, device=self._device) if gradient is None else gradient
            into.copy_(source.reshape(-1).to(into.dtype), non_blocking=True)
            # Its memory is not given away before the copy has read it.
            source.record_stream(self._stream)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._copies.put((copied, on_host))

    def close(self) -> None:
        """End the thread once all copies are done."""
        self._copies.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (copy := self._copies.get()) is not None:
            copied, on_host = copy
            copied.synchronize()
            on_host()
