"""A program with its placement, shared by all executors of it."""

from __future__ import annotations

from functools import cached_property

from hocket.base.arrays import IntArray
from hocket.capture.program import Program
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

    def _readers(self, tensor: int, device: int) -> list[int]:
        users = self.graph.users_of(tensor).tolist()
        return [op for op in users if self.device_of[op] == device]
