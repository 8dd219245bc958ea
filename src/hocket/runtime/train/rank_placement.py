"""Op placement over ranks: each runs the instructions of its device of a traced step.

All ranks run the same script and trace the same program. Losses and outputs of the model are sent
to all; gradients stay with the rank whose device has the parameter: there the user's optimizer
finds them, elsewhere it finds none and skips the parameter.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from hocket.base.errors import RunError, UsageError, one_line
from hocket.capture.program import TensorSpec
from hocket.graph.graph import Phase
from hocket.runtime.device_instructions import Do, Instruction
from hocket.runtime.device_streams import new_stream
from hocket.runtime.device_worker import DeviceWorker, HeldTensors
from hocket.runtime.lost_rank import CommunicationError
from hocket.runtime.placed_program import Setup
from hocket.runtime.step_record import StepRecord
from hocket.runtime.tensor_bytes import pack, package_bytes, unpack
from hocket.runtime.train.broadcast import broadcast_slots
from hocket.runtime.train.loss_weight import Weight, starts_backward

# Tensors in flight to other ranks: held until they have left, and no longer.
#
# Gloo finds out that a send is over only when it is waited for, so a thread waits; the memory of a
# tensor that was dropped is free again as soon as it has left, not at the end of the step.


class Outbox:
    """Sends in flight, in order."""

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


_SPIN_S = 2e-4
"""Sleeping is not more precise than this."""


class RankedStep:
    """The forward and backward of a step, as far as one rank runs it.

    Sends and receives never block: a device stands still only where it needs what has not arrived.
    With gloo, transfers are matched by their number; with NCCL by their sequence, which is the same
    on both sides of every pair.
    """

    def __init__(
        self, setup: Setup, device: torch.device, *, seed: int | None, keep: frozenset[int]
    ) -> None:
        """``device`` is the real one of this rank; draws always have seeds of their own."""
        used = setup.split.used_devices
        if dist.get_world_size() != len(used):
            raise UsageError(
                f"the plan uses {len(used)} devices, and {dist.get_world_size()} ranks are running",
                hint=f"start {len(used)} ranks, one per device: hocket launch plan.json script.py",
            )
        self.setup, program = setup, setup.program
        self.device_index = used[dist.get_rank()]
        self.worker = DeviceWorker(
            setup.calls_of(self.device_index), dict(enumerate(program.tensors)), program.draws,
            device, 0 if seed is None else seed, setup.sent,
        )  # fmt: skip
        self.stream = new_stream(device)
        self.instructions = setup.split.of_device(self.device_index)
        self.slowdown = 1.0
        self.progress: Callable[[int, int], None] = lambda step, position: None
        self._outbox = Outbox()
        self._posted: dict[int, tuple[Any, torch.Tensor]] = {}
        self._marks: dict[str, dict[int, Any]] = {}
        self._memory: list[tuple[Any, int]] = []
        self._keep = keep | {*program.outputs}
        self._weight: Weight = 1.0
        self.gradients: dict[int, torch.Tensor] = {}
        """Of the parameters whose updates are here."""
        self.record = StepRecord()
        """Times of the last step."""

    def run(
        self, given: Sequence[Mapping[int, torch.Tensor]], step: int, weight: Weight = 1.0
    ) -> None:
        """Run the whole step, together with all other ranks."""
        held = self.worker.held = HeldTensors()
        for number, tensor in given[self.device_index].items():
            held[number] = tensor
        self.gradients, self._weight = {}, weight
        self.record = self._step(step)
        for parameter, gradient in self.setup.program.gradients.items():
            if parameter not in self.gradients and gradient in held and self._is_loose(parameter):
                self.gradients[parameter] = held[gradient]

    def value(self, tensor: int) -> torch.Tensor:
        """Return a tensor that was kept, on every rank; all ranks call it together."""
        owner = self.owner(tensor)
        spec = self.setup.program.tensors[tensor].layout
        assert spec is not None
        if owner == dist.get_rank():
            found = self.worker.held[tensor].detach().contiguous()
        else:
            found = torch.empty(spec.shape, dtype=spec.dtype, device=self.worker.device)
        dist.broadcast(found, owner)
        return found

    def forget(self) -> None:
        """Drop all tensors of the step."""
        self.worker.held = HeldTensors()
        self.gradients = {}

    def owner(self, tensor: int) -> int:
        """Return the rank on whose device a tensor is first."""
        used = self.setup.split.used_devices
        producer = self.setup.program.tensors[tensor].producer
        if producer >= 0:
            return used.index(self.setup.device_of[producer])
        return next(rank for rank, d in enumerate(used) if tensor in self.setup.split.present[d])

    def _is_loose(self, parameter: int) -> bool:
        """True if no update of the plan takes the gradient of a parameter."""
        return all(
            call.phase != Phase.OPTIMIZER or call.args[0].number != parameter
            for call in self.setup.program.calls
        )

    def _step(self, number: int) -> StepRecord:
        """Run one step together with all other ranks; they count from 1."""
        self.worker.drop_results()
        held = self.worker.held
        held.peak_bytes = held.num_bytes
        self._marks = {key: {} for key in ("start", "end", "sent", "posted", "arrived")}
        self._memory = []
        self.stream.settle()
        self._meet()
        self.stream.begin()
        self.stream.make_current()
        record = StepRecord(start_s=time.perf_counter())
        with torch.enable_grad():
            for position, instruction in enumerate(self.instructions):
                self.progress(number, position)
                self._obey(instruction, number)
        _talk(self._outbox.flush)
        self.stream.finish()
        record.end_s = time.perf_counter()
        self.stream.release_current()
        self._fill(record)
        return record

    def _meet(self) -> None:
        """All ranks begin a step together."""
        if dist.get_world_size() == 1:
            return
        if self.stream.is_cuda:
            _talk(lambda: dist.barrier(device_ids=[self.stream.device.index]))
            torch.cuda.synchronize(self.stream.device)
        else:
            _talk(dist.barrier)

    def _obey(self, instruction: Instruction, step: int) -> None:
        do, number = instruction
        if do == Do.RUN:
            self._run(number, step)
        elif do == Do.SEND:
            self._send(number)
        elif do == Do.POST:
            self._post(number)
        elif do == Do.WAIT:
            self._wait(number)
        elif number not in self._keep:
            self.worker.drop(number)

    def _run(self, op: int, step: int) -> None:
        call = self.setup.program.calls[op]
        started_s = time.perf_counter()
        self._marks["start"][op] = start = self.stream.mark()
        if call.phase == Phase.OPTIMIZER:
            self.gradients[call.args[0].number] = self.worker.held[call.args[1].number]
            self._marks["end"][op] = start
            return
        self._memory.append((start, self.worker.held.num_bytes))
        try:
            self.worker.run(op, step)
        # Whatever an op of the user's model raises is a failed run, not a bug of ours.
        except Exception as error:
            name = self.setup.graph.op_names[op]
            raise RunError(f"op {name!r} failed in step {step}: {one_line(error)}") from error
        if self.slowdown > 1.0:
            _stand_still((time.perf_counter() - started_s) * (self.slowdown - 1.0))
        self._marks["end"][op] = end = self.stream.mark()
        self._memory.append((end, self.worker.held.num_bytes))
        if starts_backward(self.setup.program, call):
            (seed,) = (output for output in call.outputs if output is not None)
            self.worker.held[seed].mul_(self._weight)

    def _peer(self, number: int) -> tuple[int, int, TensorSpec, bool]:
        """Return tensor, other rank and spec of a transfer, and if its whole storage is sent."""
        tensor, src, dst = self.setup.split.transfers[number]
        other = self.setup.split.used_devices.index(dst if src == self.device_index else src)
        return tensor, other, self.worker.specs[tensor], self.setup.is_whole[number]

    def _send(self, number: int) -> None:
        tensor, rank, spec, whole = self._peer(number)
        self._marks["sent"][number] = self.stream.mark()
        if package_bytes(spec, whole):
            data = pack(self.worker.held[tensor], spec, whole).to(self.stream.device)
        else:
            data = self._nothing()
        self._outbox.put(_talk(lambda: dist.isend(data, rank, tag=number)), data)

    def _post(self, number: int) -> None:
        _, rank, spec, whole = self._peer(number)
        size = package_bytes(spec, whole)
        data = self._nothing() if not size else torch.empty(
            size, dtype=torch.uint8, device=self.stream.device
        )  # fmt: skip
        self._marks["posted"][number] = self.stream.mark()
        self._posted[number] = _talk(lambda: dist.irecv(data, rank, tag=number)), data

    def _wait(self, number: int) -> None:
        work, data = self._posted.pop(number)
        _talk(work.wait)
        self._marks["arrived"][number] = self.stream.mark()
        tensor, _, spec, whole = self._peer(number)
        if spec.layout is None:
            return
        arrived = unpack(data if package_bytes(spec, whole) else data[:0], spec, whole)
        # Some kernels of accelerators leave small tensors in the memory of the host.
        is_host = tensor in self.setup.host_tensors
        self.worker.held[tensor] = arrived.cpu() if is_host else arrived

    def _nothing(self) -> torch.Tensor:
        """One byte, where there is nothing to send but that something has happened."""
        return torch.zeros(1, dtype=torch.uint8, device=self.stream.device)

    def _fill(self, record: StepRecord) -> None:
        seconds = self.stream.seconds
        for name, target in (
            ("start", record.op_start_s),
            ("end", record.op_end_s),
            ("sent", record.sent_s),
            ("posted", record.posted_s),
            ("arrived", record.arrived_s),
        ):
            target.update({number: seconds(mark) for number, mark in self._marks[name].items()})
        device = self.device_index
        record.memory[device] = [(seconds(mark), size) for mark, size in self._memory]
        record.peak_bytes[device] = (
            torch.cuda.max_memory_allocated(self.stream.device)
            if self.stream.is_cuda
            else self.worker.held.peak_bytes
        )


def _talk(action: Callable[[], Any]) -> Any:
    try:
        return action()
    except RuntimeError as error:
        raise CommunicationError(f"lost another rank: {error}") from error


def _stand_still(duration_s: float) -> None:
    until_s = time.perf_counter() + duration_s
    if duration_s > 2 * _SPIN_S:
        time.sleep(duration_s - _SPIN_S)
    while time.perf_counter() < until_s:
        pass


# ── what all ranks do together ───────────────────────────────────────────────────────────────


def clip_together(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> None:
    """Clip gradients by the norm of those of all ranks, as one process would, bit for bit.

    Each rank contributes the norms of the gradients that it has; the common norm is taken of all
    of them in the order of the parameters.
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
    """Give every rank the newest weights, buffers and optimizer states of all others."""
    program = step.setup.program
    owner_of: dict[int, int] = {}
    for number, name in program.names.items():
        if name in tensors:
            owner = owner_of[id(tensors[name])] = step.owner(number)
            _share(tensors[name].data, owner, step.worker.device)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in owner_of:
                _share_slots(optimizer, parameter, owner_of[id(parameter)], step.worker.device)


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
    """The states of one parameter."""
    own = optimizer.state[parameter] if owner == dist.get_rank() else {}
    slots = broadcast_slots(own, owner, device)
    if owner != dist.get_rank() and slots:
        optimizer.state[parameter] = slots
