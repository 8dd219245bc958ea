"""One device of a run: its tensors, and its calls bound to it."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

import torch

from hocket.capture.perform import BoundCall, draw_seed, seed_device
from hocket.capture.program import Call, TensorSpec
from hocket.capture.storage import first_tensors
from hocket.graph.graph import Role
from hocket.runtime.held import Held
from hocket.runtime.kernels import stand_in


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
        """Without a ``seed`` draws go on where the generators of PyTorch stand.

        ``sent`` are the tensors that leave the device.
        """
        self.device, self.seed = device, seed
        self.specs, self.draws = specs, draws
        self.held = Held()
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
        """Put the tensors there that exist before the first step; see `given_storages`."""
        for number, tensor in first_tensors(present, self.specs, storages, self.device).items():
            self.held[number] = tensor

    def run(self, op: int, step: int) -> None:
        """Run one call; ``step`` counts from 1."""
        if op in self.draws and self.seed is not None:
            seed_device(self.device, draw_seed(self.seed, step, self.draws[op]))
        self._bound[op].perform(self.held, step)

    def drop(self, tensor: int) -> None:
        """Forget a tensor; one that only orders ops was never there."""
        self.held.pop(tensor, None)

    def drop_results(self) -> None:
        """Forget gradients and outputs of the step before."""
        results = [t for t in self.held if self.specs[t].role in (Role.GRADIENT, Role.OUTPUT)]
        for tensor in results:
            del self.held[tensor]
