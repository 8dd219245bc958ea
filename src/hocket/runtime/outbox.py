"""Tensors on their way to other ranks: held until they have left, and no longer.

Gloo finds out that a send is over only when it is waited for, so a thread waits; the memory of a
tensor that was dropped is free again as soon as it has left, not at the end of the step.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch


class Outbox:
    """Sends under way, in order."""

    def __init__(self) -> None:
        self._sends: queue.Queue[tuple[Any, torch.Tensor]] = queue.Queue()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait_for_all, daemon=True).start()

    def put(self, work: Any, data: torch.Tensor) -> None:
        """Hold ``data`` until ``work``, which sends it, is done."""
        self._sends.put((work, data))

    def flush(self) -> None:
        """Wait until everything has left; raises what a send has raised."""
        self._sends.join()
        if self._error is not None:
            raise self._error

    def _wait_for_all(self) -> None:
        while True:
            work, data = self._sends.get()
            try:
                _wait_for(work, data)
            except RuntimeError as error:
                self._error = error
            del work, data
            self._sends.task_done()


def _wait_for(work: Any, data: torch.Tensor) -> None:
    if not data.is_cuda:
        work.wait()
        return
    # With NCCL only the current stream waits, so the host waits for that stream.
    with torch.cuda.device(data.device):
        work.wait()
        torch.cuda.current_stream().synchronize()
