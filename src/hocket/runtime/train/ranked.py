"""Carry out the part of one rank of a recorded step, in a script that was started once per rank.

All ranks run the same script and record the same program; each follows the instructions of its
device. Losses and what the model returns are sent to all, gradients stay with the rank whose device
has the parameter: there the person's optimizer finds them, elsewhere it finds none and goes by.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from functools import reduce

import torch
import torch.distributed as dist

from hocket.base.errors import RunError, UsageError, one_line
from hocket.graph.graph import Phase
from hocket.runtime.held import Held
from hocket.runtime.peer import Peer
from hocket.runtime.ranks import RankRunner
from hocket.runtime.record import StepRecord
from hocket.runtime.setup import Setup
from hocket.runtime.split import Do, Instruction
from hocket.runtime.streams import new_stream
from hocket.runtime.train.broadcast import broadcast_slots
from hocket.runtime.train.loss_weight import Weight, starts_backward
from hocket.runtime.worker import DeviceWorker


class RankedStep(RankRunner):
    """The forward and backward of a step, as far as one rank carries it."""

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
        self.setup = setup
        index = used[dist.get_rank()]
        program = setup.program
        worker = DeviceWorker(
            setup.calls_of(index), dict(enumerate(program.tensors)), program.draws, device,
            0 if seed is None else seed, setup.sent,
        )  # fmt: skip
        instructions = setup.split.of_device(index)
        peers: dict[int, Peer] = dict(peers_of(setup, instructions, index))
        super().__init__(worker, new_stream(device), instructions, peers, device_index=index)
        self._keep = keep | {*program.outputs}
        self._weight: Weight = 1.0
        self.gradients: dict[int, torch.Tensor] = {}
        """Of the parameters whose updates are here."""
        self.record = StepRecord()
        """Times of the last step."""

    def run(
        self, given: Sequence[Mapping[int, torch.Tensor]], step: int, weight: Weight = 1.0
    ) -> None:
        """The whole step, together with all other ranks."""
        held = self.worker.held = Held()
        for number, tensor in given[self.device_index].items():
            held[number] = tensor
        self.gradients, self._weight = {}, weight
        self.record = self.step(step)
        for parameter, gradient in self.setup.program.gradients.items():
            if parameter not in self.gradients and gradient in held and self._is_loose(parameter):
                self.gradients[parameter] = held[gradient]

    def value(self, tensor: int) -> torch.Tensor:
        """A tensor that was kept; all ranks ask for it together, and all get it."""
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
        """Drop all that the step held."""
        self.worker.held = Held()
        self.gradients = {}

    def owner(self, tensor: int) -> int:
        """The rank on whose device a tensor first is."""
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

    def _run(self, op: int, step: int) -> None:
        call = self.setup.program.calls[op]
        if call.phase == Phase.OPTIMIZER:
            self.gradients[call.args[0].number] = self.worker.held[call.args[1].number]
            self._marks["start"][op] = self._marks["end"][op] = self.stream.mark()
            return
        try:
            super()._run(op, step)
        # Whatever an op of the user's model raises is a failed run, not a bug of ours.
        except Exception as error:
            name = self.setup.graph.op_names[op]
            raise RunError(f"op {name!r} failed in step {step}: {one_line(error)}") from error
        if starts_backward(self.setup.program, call):
            (seed,) = (output for output in call.outputs if output is not None)
            self.worker.held[seed].mul_(self._weight)

    def _obey(self, instruction: Instruction, step: int) -> None:
        if instruction.do == Do.DROP and instruction.number in self._keep:
            return
        super()._obey(instruction, step)


def peers_of(
    setup: Setup, instructions: Sequence[Instruction], device: int
) -> list[tuple[int, Peer]]:
    """Return the transfers of a device by number."""
    used = setup.split.used_devices
    found = []
    for do, number in instructions:
        if do in (Do.SEND, Do.POST):
            tensor, src, dst = setup.split.transfers[number]
            other = used.index(dst if src == device else src)
            is_host = tensor in setup.host_tensors
            found.append((number, Peer(tensor, other, setup.is_whole[number], is_host)))
    return found


def join_ranks(environment: Mapping[str, str]) -> bool:
    """Join the ranks that ``hocket launch``, torchrun or ``accelerate launch`` has started.

    False where this process is alone.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    if int(environment.get("WORLD_SIZE", "1")) < 2 or "RANK" not in environment:
        return False
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # Threads of groups that are still there when Python ends take the process down with them.
    atexit.register(_leave_ranks)
    return True


def _leave_ranks() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_device(environment: Mapping[str, str]) -> torch.device:
    """The real device of this rank."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(environment.get("LOCAL_RANK", "0")))


# ── what all ranks do together ───────────────────────────────────────────────────────────────


def clip_together(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> None:
    """Clip gradients by the norm of those of all ranks, as one process would, bit for bit.

    Each rank tells the norms of the gradients that it has; the common norm is taken of all of them
    in the order of the parameters.
    """
    device = next((p.grad.device for p in parameters if p.grad is not None), torch.device("cpu"))
    # Norms have the numbers of the gradients, also of those that others have.
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
