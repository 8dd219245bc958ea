"""A program with its placement, shared by all executors of it."""

from __future__ import annotations

from functools import cached_property

from hocket.base.arrays import IntArray
from hocket.capture.program import Call, Program
from hocket.graph.graph import Graph
from hocket.runtime.cpu_attention import FUSED_ATTENTION
from hocket.runtime.device_instructions import StepCalls
from hocket.runtime.tensor_bytes import needs_storage


class Setup:
    """A traced program and the device of each op."""

    def __init__(
        self, graph: Graph, program: Program, device_of: IntArray, split: StepCalls
    ) -> None:
        self.graph, self.program, self.split = graph, program, split
        self.device_of: list[int] = device_of.tolist()

    def calls_of(self, device: int) -> dict[int, Call]:
        """The calls of one device."""
        return {
            op: self.program.calls[op] for op, owner in enumerate(self.device_of) if owner == device
        }

    @cached_property
    def senders(self) -> frozenset[int]:
        """Ops that make what is sent."""
        producers = (self.program.tensors[t.tensor].producer for t in self.split.transfers)
        return frozenset(producer for producer in producers if producer >= 0)

    @cached_property
    def sent(self) -> frozenset[int]:
        """Tensors that go to another device."""
        return frozenset(transfer.tensor for transfer in self.split.transfers)

    @cached_property
    def is_whole(self) -> list[bool]:
        """Per transfer, whether the whole storage has to travel."""
        return [
            needs_storage(self.program, tensor, self._readers(tensor, dst))
            for tensor, _, dst in self.split.transfers
        ]

    @cached_property
    def host_tensors(self) -> frozenset[int]:
        """Tensors that kernels of accelerators leave in the memory of the host.

        The state of the generator with which fused attention drew its dropout.
        """
        return frozenset(
            output
            for call in self.program.calls
            if call.cost.kind == FUSED_ATTENTION
            for output in call.outputs[2:]
            if output is not None
        )

    @cached_property
    def loss(self) -> tuple[int, int] | None:
        """The tensor of the loss and the device that has it; None in inference."""
        if not self.program.gradients or not self.program.outputs:
            return None
        tensor = self.program.outputs[0]
        producer = self.program.tensors[tensor].producer
        if producer >= 0:
            return tensor, self.device_of[producer]
        return tensor, next(d for d, there in enumerate(self.split.present) if tensor in there)

    def _readers(self, tensor: int, device: int) -> list[int]:
        users = self.graph.users_of(tensor).tolist()
        return [op for op in users if self.device_of[op] == device]
