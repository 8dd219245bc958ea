"""All parts on one accelerator, in this process: each on a stream of its own.

An input is copied to the device once; every part is recorded as a CUDA graph and replayed on its
stream, so that small parts run side by side. Nothing here can die alone, so copies of classes only
steady the answer. Without a GPU (``cpu``) the parts run one after the other.
"""

from __future__ import annotations

import io
import threading
import time
from typing import Any

import numpy as np
import torch

from hocket.base.arrays import FloatArray
from hocket.base.errors import RunError, UsageError
from hocket.classes.artefact import Folder, read_exported
from hocket.classes.serving.front_end import Answer, answer_from
from hocket.classes.serving.link import Counts, recent_times
from hocket.classes.serving.metrics import Metrics, metrics_of
from hocket.classes.serving.wire import InputLayout
from hocket.classes.stepping import captured_work
from hocket.classes.table import PartTable


class DeviceFrontEnd:
    """The parts of a folder on one device; use it as a context."""

    def __init__(self, folder: Folder, device: str) -> None:
        try:
            self._device = torch.device(device)
            torch.zeros(1, device=self._device)
        except (RuntimeError, AssertionError) as error:
            raise UsageError(f"cannot use the device {device!r}: {error}") from None
        self._table = folder.table
        self._combiner = folder.table.combiner()
        self._layout = InputLayout(folder.table.input_shape, folder.table.input_dtype)
        self._counts = [Counts() for _ in folder.table.parts]
        self._lock = threading.Lock()
        self._is_closed = False
        self._times_ns = recent_times()
        kind = getattr(torch, folder.table.input_dtype)
        self._inputs = torch.zeros((1, *folder.table.input_shape), dtype=kind, device=self._device)
        self._outputs: list[torch.Tensor] = []
        with torch.no_grad():
            self._parts = [self._captured(content) for content in read_exported(folder)]

    def _captured(self, content: bytes) -> Any:
        part = torch.export.load(io.BytesIO(content)).module().to(self._device)
        outputs = torch.zeros_like(part(self._inputs))
        self._outputs.append(outputs)
        return captured_work(lambda: outputs.copy_(part(self._inputs)), self._device)

    def __enter__(self) -> DeviceFrontEnd:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True

    def checked(self, inputs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """An input as the parts take it; raises `UsageError` for anything else."""
        return self._layout.checked(inputs)

    def predict(self, inputs: np.ndarray[Any, Any], deadline_s: float | None = None) -> Answer:
        """The answer to one input; what runs on a device cannot be left behind at a deadline."""
        checked = self.checked(inputs)
        with self._lock, torch.no_grad():
            if self._is_closed:
                raise RunError("the front end is closed")
            start_ns = time.perf_counter_ns()
            self._inputs.copy_(torch.from_numpy(checked))
            for part in self._parts:
                part.start()
            for part in self._parts:
                part.finish()
            outputs = [each.float().cpu().numpy()[0].astype(float) for each in self._outputs]
            kept: list[FloatArray | None] = [
                each if np.isfinite(each).all() else None for each in outputs
            ]
            answer = answer_from(self._combiner, kept, sum(each is None for each in kept), start_ns)
            took_ns = round(answer.took_s * 1e9)
            for counts in self._counts:
                counts.answered += 1
                counts.round_trip_ns.append(took_ns)
            self._times_ns.append(took_ns)
            return answer

    @property
    def table(self) -> PartTable:
        """The model that is served."""
        return self._table

    @property
    def num_alive(self) -> int:
        """Parts that can be asked: all of them."""
        return len(self._parts)

    def metrics(self) -> Metrics:
        """Times so far."""
        return metrics_of(self._times_ns, [(True, counts) for counts in self._counts])
