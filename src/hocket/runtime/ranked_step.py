"""Op placement across ranks: each rank runs the instructions of its device in a traced step.

All ranks run the same script and trace the same program. Losses and outputs of the model are
broadcast to all ranks. Gradients stay on the rank whose device has the parameter, where the user's
optimizer applies them; on other ranks the parameter has no gradient, and the optimizer skips it.
This file also clips gradients by their norm over all ranks, and gathers weights and optimizer
states.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from hocket.base.errors import UsageError
from hocket.capture.program import TensorSpec
from hocket.graph.graph import Phase
from hocket.runtime.device_instructions import Setup
from hocket.runtime.placed_step import PlacedStep
from hocket.runtime.ranks import CommunicationError, broadcast_slots
from hocket.runtime.step_record import StepRecord
from hocket.runtime.tensor_bytes import pack, package_bytes, unpack
from hocket.runtime.trace_options import Weight

# Tensors in flight to other ranks are held until their send has completed, and no longer.
#
# Gloo finds out that a send is over only when it is waited for, so a thread waits; the memory of a
# tensor that was dropped is free again as soon as it has left, not at the end of the step.


class Outbox:
    """Sends in flight, in order; a thread holds each tensor until its send is complete."""

    def __init__(self) -> None:
        self._sends: queue.Queue[tuple[Any, torch.Tensor]] = queue.Queue()
        self._error: RuntimeError | None = None
        threading.Thread(target=self._wait_for_all, daemon=True).start()

    def put(self, work: Any, data: torch.Tensor) -> None:
        """Hold ``data`` until its send ``work`` is complete."""
        self._sends.put((work, data))

    def flush(self) -> None:
        """Wait until all sends are complete; raises the error of a failed send."""
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
                f"the plan uses {len(used)} devices, and {dist.get_world_size()} ranks are running",
                hint=f"start {len(used)} ranks, one per device: hocket launch plan.json script.py",
            )
        self.device_index, self.device = used[dist.get_rank()], device
        super().__init__(setup, {self.device_index: device}, seed=seed or 0, keep=keep)
        self._outbox = Outbox()
        self._posted: dict[int, tuple[Any, torch.Tensor]] = {}
        self.record = StepRecord()
        """Times of the last step."""

    def run(
        self, given: Sequence[Mapping[int, torch.Tensor]], step: int, weight: Weight = 1.0
    ) -> StepRecord:
        """Run forward and backward of a step, together with all other ranks."""
        self.record = super().run(given, step, weight)
        return self.record

    def value(self, tensor: int) -> torch.Tensor:
        """Return a tensor that was kept, on every rank. Collective: all ranks call it together."""
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
        """Return the rank of the device that a tensor is first on."""
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
        _talk(self._outbox.flush)

    def _mark(self, kind: str, number: int) -> None:
        stream = self.streams[self.device_index]
        self._marks[kind][number] = stream, stream.mark()

    def _peer(self, number: int) -> tuple[int, int, TensorSpec, bool]:
        """Return a transfer's tensor, other rank, spec, and whether its entire storage is sent."""
        tensor, src, dst = self.setup.split.transfers[number]
        other = self.setup.split.used_devices.index(dst if src == self.device_index else src)
        return tensor, other, self.program.tensors[tensor], self.setup.is_whole[number]

    def _send(self, device: int, number: int) -> None:
        tensor, rank, spec, whole = self._peer(number)
        self._mark("sent", number)
        if package_bytes(spec, whole):
            data = pack(self.held[device][tensor], spec, whole).to(self.device)
        else:
            data = self._nothing()
        self._outbox.put(_talk(lambda: dist.isend(data, rank, tag=number)), data)

    def _post(self, number: int) -> None:
        _, rank, spec, whole = self._peer(number)
        size = package_bytes(spec, whole)
        data = self._nothing() if not size else torch.empty(
            size, dtype=torch.uint8, device=self.device
        )  # fmt: skip
        self._mark("posted", number)
        self._posted[number] = _talk(lambda: dist.irecv(data, rank, tag=number)), data

    def _wait(self, device: int, number: int) -> None:
        work, data = self._posted.pop(number)
        _talk(work.wait)
        self._mark("arrived", number)
        tensor, _, spec, whole = self._peer(number)
        if spec.layout is None:
            return
        arrived = unpack(data if package_bytes(spec, whole) else data[:0], spec, whole)
        # Some kernels of accelerators leave small tensors in the memory of the host.
        is_host = tensor in self.setup.host_tensors
        self.held[device][tensor] = arrived.cpu() if is_host else arrived

    def _nothing(self) -> torch.Tensor:
        """Return one byte, as the message of a transfer that only orders ops."""
        return torch.zeros(1, dtype=torch.uint8, device=self.device)


def _talk(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except RuntimeError as error:
        raise CommunicationError(f"lost another rank: {error}") from error


# ── collectives of all ranks ─────────────────────────────────────────────────────────────────


def clip_together(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> None:
    """Clip gradients by their norm over all ranks, with the same bits as in one process.

    Each rank contributes the norms of its local gradients; the global norm is computed from all of
    them in the order of the parameters.
    """
    device = next((p.grad.device for p in parameters if p.grad is not None), torch.device("cpu"))
    # Norms have the type of the gradients, also of those that other ranks have.
    dtype = reduce(torch.promote_types, (parameter.dtype for parameter in parameters))
    norms = torch.zeros(2, len(parameters), device=device, dtype=dtype)
    own = []
    for at, parameter in enumerate(parameters):
        if parameter.grad is not None:
            own.append(parameter)
            norms[0, at], norms[1, at] = 1, torch.linalg.vector_norm(parameter.grad)
    dist.all_reduce(norms)
    total = torch.linalg.vector_norm(norms[1][norms[0] > 0])
    torch.nn.utils.clip_grads_with_norm_(own, max_norm, total)


def gather_state(
    step: RankedStep, tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer
) -> None:
    """Broadcast weights, buffers and optimizer states from their owners to all ranks."""
    program = step.setup.program
    owner_of: dict[int, int] = {}
    for number, name in program.names.items():
        if name in tensors:
            owner = owner_of[id(tensors[name])] = step.owner(number)
            _share(tensors[name].data, owner, step.device)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in owner_of:
                _share_slots(optimizer, parameter, owner_of[id(parameter)], step.device)


def _share(tensor: torch.Tensor, owner: int, device: torch.device) -> None:
    sent = tensor.detach().to(device).contiguous()
    dist.broadcast(sent, owner)
    if owner != dist.get_rank():
        tensor.copy_(sent)


def _share_slots(
    optimizer: torch.optim.Optimizer,
    parameter: torch.nn.Parameter,
    owner: int,
    device: torch.device,
) -> None:
    """Broadcast the optimizer states of one parameter."""
    own = optimizer.state[parameter] if owner == dist.get_rank() else {}
    slots = broadcast_slots(own, owner, device)
    if owner != dist.get_rank() and slots:
        optimizer.state[parameter] = slots
