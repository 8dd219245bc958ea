"""Run one device's instructions of a traced step on one rank, with messages for transfers.

Each rank executes the instructions of one device of the plan. Transfers between devices are
non-blocking sends and receives of packed bytes. Losses and outputs are broadcast from the rank that
has computed them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hocket.base.errors import UsageError
from hocket.capture.program import TensorSpec
from hocket.graph.graph import Phase
from hocket.runtime.device_instructions import Setup
from hocket.runtime.placed_step import PlacedStep
from hocket.runtime.ranks import CommunicationError, PendingSends
from hocket.runtime.tensor_bytes import pack, package_bytes, unpack


class RankedStep(PlacedStep):
    """The instructions of one rank in a step.

    Sends and receives never block: a device waits only when an op needs a tensor that has not
    arrived. With gloo, transfers are matched by their number; with NCCL by their order, which is
    the same on both sides of every pair.
    """

    def __init__(
        self, setup: Setup, device: torch.device, *, seed: int | None, keep: frozenset[int]
    ) -> None:
        """``device`` is the real device of this rank; random draws always use derived seeds."""
        used = setup.split.used_devices
        if dist.get_world_size() != len(used):
            raise UsageError(
                f"the plan uses {len(used)} device{'s' * (len(used) > 1)}, and "
                f"{dist.get_world_size()} ranks are running",
                hint="start one rank per device of the plan (hocket launch plan.json script.py); "
                'under torchrun name a plan: hocket.prepare(…, plan="plan.json")',
            )
        self.device_index, self.device = used[dist.get_rank()], device
        super().__init__(setup, {self.device_index: device}, seed=seed or 0, keep=keep)
        self._sends = PendingSends()
        self._posted: dict[int, tuple[Any, torch.Tensor]] = {}
        # Messages arrive on the device, but kernels of fused attention expect their generator state
        # on the host.
        self._host_tensors = setup.host_tensors

    def value(self, tensor: int) -> torch.Tensor:
        """Return a kept tensor on every rank. Collective: all ranks must call it."""
        owner = self.owner(tensor)
        spec = self.program.tensors[tensor].layout
        assert spec is not None
        if owner == dist.get_rank():
            found = super().value(tensor).detach().contiguous()
        else:
            found = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        dist.broadcast(found, owner)
        return found

    def owner(self, tensor: int) -> int:
        """Return the rank that computes a tensor, or for inputs the first rank that has it."""
        used = self.setup.split.used_devices
        producer = self.program.tensors[tensor].producer
        if producer >= 0:
            return used.index(self.setup.device_of[producer])
        return next(rank for rank, d in enumerate(used) if tensor in self.setup.split.present[d])

    def _take_gradients(self) -> None:
        """Collect local gradients of parameters that no update of the plan handles."""
        updated = {
            call.args[0].number for call in self.program.calls if call.phase == Phase.OPTIMIZER
        }
        held = self.held[self.device_index]
        for parameter, gradient in self.program.gradients.items():
            if parameter not in updated and gradient in held:
                self.gradients[parameter] = held[gradient]

    def _meet(self) -> None:
        """Synchronize all ranks before a step."""
        if dist.get_world_size() == 1:
            return
        if self.device.type == "cuda":
            _talk(lambda: dist.barrier(device_ids=[self.device.index]))
            torch.cuda.synchronize(self.device)
        else:
            _talk(dist.barrier)

    def _flush(self) -> None:
        _talk(self._sends.wait)

    def _mark(self, name: str, number: int) -> None:
        stream = self.streams[self.device_index]
        self._marks[name][number] = stream, stream.mark()

    def _peer(self, number: int) -> tuple[int, int, TensorSpec, bool]:
        """Return a transfer's tensor, other rank, spec, and whether its entire storage is sent."""
        tensor, src, dst = self.setup.split.transfers[number]
        other = self.setup.split.used_devices.index(dst if src == self.device_index else src)
        return tensor, other, self.program.tensors[tensor], self.setup.is_whole[number]

    def _send(self, device: int, number: int) -> None:
        tensor, rank, spec, whole = self._peer(number)
        self._mark("sent_s", number)
        if package_bytes(spec, whole):
            data = pack(self.held[device][tensor], spec, whole).to(self.device)
        else:
            data = self._buffer(0)
        _talk(lambda: self._sends.put(dist.isend(data, rank, tag=number), data))

    def _post(self, number: int) -> None:
        _, rank, spec, whole = self._peer(number)
        data = self._buffer(package_bytes(spec, whole))
        self._mark("posted_s", number)
        self._posted[number] = _talk(lambda: dist.irecv(data, rank, tag=number)), data

    def _wait(self, device: int, number: int) -> None:
        work, data = self._posted.pop(number)
        _talk(work.wait)
        self._mark("arrived_s", number)
        tensor, _, spec, whole = self._peer(number)
        if spec.layout is not None:
            arrived = unpack(data[: package_bytes(spec, whole)], spec, whole)
            is_host = tensor in self._host_tensors
            self.held[device][tensor] = arrived.cpu() if is_host else arrived

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        """Return memory for a message; a message that only orders ops has one byte."""
        return torch.empty(max(1, num_bytes), dtype=torch.uint8, device=self.device)


def _talk(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except RuntimeError as error:
        raise CommunicationError(f"lost another rank: {error}") from error
