"""One device of a run: its tensors, and its calls bound to it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch

from hocket.capture.perform import BoundCall, draw_seed, seed_device
from hocket.capture.program import Call, TensorSpec
from hocket.capture.storage import first_tensors
from hocket.graph.graph import Role
from hocket.runtime.cpu_attention import stand_in


class HeldTensors(dict[int, torch.Tensor]):
    """Tensors by number, and the bytes behind them; a storage with several views counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0
        """Bytes of all storages that are held now."""
        self.peak_bytes = 0
        self._num_tensors: dict[int, int] = {}

    def __setitem__(self, number: int, tensor: torch.Tensor) -> None:
        if number in self:
            del self[number]
        storage = tensor.untyped_storage()
        count = self._num_tensors.get(storage._cdata, 0)
        self._num_tensors[storage._cdata] = count + 1
        if not count:
            self.num_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        super().__setitem__(number, tensor)

    def __delitem__(self, number: int) -> None:
        storage = self[number].untyped_storage()
        count = self._num_tensors.pop(storage._cdata) - 1
        if count:
            self._num_tensors[storage._cdata] = count
        else:
            self.num_bytes -= storage.nbytes()
        super().__delitem__(number)

    def pop(self, number: int, *default: Any) -> Any:
        """Remove a tensor and return it."""
        if default and number not in self:
            return default[0]
        tensor = self[number]
        del self[number]
        return tensor


class DeviceWorker:
    """Runs the calls of one device on the tensors that it holds."""

    def __init__(
        self,
        calls: Mapping[int, Call],
        specs: Mapping[int, TensorSpec],
        draws: Mapping[int, int],
        device: torch.device,
        seed: int | None,
        sent: Container[int],
    ) -> None:
        """Without a ``seed`` draws continue from the state of PyTorch's generators.

        ``sent`` are the tensors that leave the device.
        """
        self.device, self.seed = device, seed
        self.specs, self.draws = specs, draws
        self.held = HeldTensors()
        self._bound = {
            op: BoundCall(
                call,
                device,
                stand_in(
                    call, [None if t is None else specs[t] for t in call.outputs], device, sent
                ),
            )
            for op, call in calls.items()
        }

    def load(self, present: Iterable[int], storages: Mapping[int, torch.Tensor]) -> None:
        """Load the tensors that exist before the first step; see `given_storages`."""
        for number, tensor in first_tensors(present, self.specs, storages, self.device).items():
            self.held[number] = tensor

    def run(self, op: int, step: int) -> None:
        """Run one call; ``step`` counts from 1."""
        if op in self.draws and self.seed is not None:
            seed_device(self.device, draw_seed(self.seed, step, self.draws[op]))
        self._bound[op].perform(self.held, step)

    def drop(self, tensor: int) -> None:
        """Drop a tensor; one that only orders ops was never there."""
        self.held.pop(tensor, None)

    def drop_results(self) -> None:
        """Drop gradients and outputs of the previous step."""
        results = [t for t in self.held if self.specs[t].role in (Role.GRADIENT, Role.OUTPUT)]
        for tensor in results:
            del self.held[tensor]
