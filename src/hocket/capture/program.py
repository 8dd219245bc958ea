"""Data types of a Program: recorded calls that can be executed, with the numbers of the Graph.

``calls[i]`` is op i of the graph, and tensor number t is tensor t of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from hocket.capture.recording import Cost, Returned, TensorLayout
from hocket.graph import Phase, Role


class Call(NamedTuple):
    """One op: its function, arguments and results."""

    function: Any
    """An OpOverload, or a name such as ``"optimizer.adamw"``."""
    args: Any
    """Positional arguments, with `Ref` in place of tensors and `Constant` for tensors stored by
    value."""
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    """Tensor number of each flattened result; None where a result is not a tensor."""
    targets: tuple[int, ...]
    """Tensors that the call writes in place."""
    written: tuple[int, ...]
    """For each target, the tensor number of its new version."""
    reads: tuple[int, ...]
    """Tensors that must exist before the call, including control tensors, which only order ops."""
    phase: Phase
    module: str
    partner: int
    draws: bool
    is_view: bool
    cost: Cost


class TensorSpec(NamedTuple):
    """One tensor of a program."""

    layout: TensorLayout | None
    """None for tensors that exist only to order ops."""
    storage: int
    """Tensors with equal numbers share memory; -1 for those without memory."""
    storage_bytes: int
    role: Role
    alias_of: int
    producer: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A step as a list of calls on numbered tensors."""

    calls: tuple[Call, ...]
    tensors: tuple[TensorSpec, ...]
    names: Mapping[int, str]
    """Names of tensors that exist before the step: parameters, buffers, batch, optimizer state."""
    gradients: Mapping[int, int]
    """Final gradient of each parameter."""
    outputs: tuple[int, ...]
    """Results for the user: the loss in training, all outputs in inference."""
    returned: Returned | None = None
    """Complete output of the model, including tensors that are not in ``outputs``."""
    repeats: Mapping[int, int] = field(default_factory=dict)
    """Recomputed calls, each with the call that it repeats.

    In a model with its own checkpoints only calls that draw random numbers are listed.
    """
    unseen: str = ""
    """Side effects of the step that are not calls; unless empty, running only the calls would give
    other results."""

    @cached_property
    def draws(self) -> dict[int, int]:
        """Calls that draw random numbers, with the index of their draw.

        A recomputed call has the draw index of the original.
        """
        drawing = [index for index, call in enumerate(self.calls) if call.draws]
        firsts = (index for index in drawing if index not in self.repeats)
        found = {index: draw for draw, index in enumerate(firsts)}
        return {index: found[self.repeats.get(index, index)] for index in drawing}

    @property
    def parameters(self) -> dict[str, int]:
        """Tensor numbers of the parameters by name."""
        return self._sources(Role.PARAMETER)

    @property
    def buffers(self) -> dict[str, int]:
        """Tensor numbers of the buffers by name."""
        return self._sources(Role.BUFFER)

    @property
    def inputs(self) -> dict[str, int]:
        """Tensor numbers of the batch's tensors by name."""
        return self._sources(Role.INPUT)

    def _sources(self, role: Role) -> dict[str, int]:
        return {name: t for t, name in self.names.items() if self.tensors[t].role == role}
