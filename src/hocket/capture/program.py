"""The Program: the recorded calls with the numbering of the Graph, so that they can be run.

``calls[i]`` is op i of the graph and tensor number t is tensor t of the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from hocket.capture.recording import Cost, Returned, TensorLayout
from hocket.graph import Phase, Role


class Call(NamedTuple):
    """One op: what to call, on which tensors, and what comes out."""

    function: Any
    """An OpOverload, or ``"optimizer.adamw"`` and the like."""
    args: Any
    """Positional arguments with `Ref` in place of tensors and `Constant` for kept ones."""
    kwargs: Mapping[str, Any]
    outputs: tuple[int | None, ...]
    """Tensor number of each flattened result; None where a result is not a tensor."""
    targets: tuple[int, ...]
    """Tensors that the call writes in place."""
    written: tuple[int, ...]
    """For each target, the tensor that stands for its new content."""
    reads: tuple[int, ...]
    """Tensors that must be there before the call, those that only order it included."""
    phase: Phase
    module: str
    partner: int
    draws: bool
    is_view: bool
    cost: Cost


class TensorSpec(NamedTuple):
    """One tensor of a program."""

    layout: TensorLayout | None
    """None for tensors that only order ops."""
    storage: int
    """Tensors with the same number share memory; -1 for those without."""
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
    """Names of the tensors that exist before the step: parameters, buffers, batch, states."""
    gradients: Mapping[int, int]
    """Parameter to its final gradient."""
    outputs: tuple[int, ...]
    """Results for the user: the loss in training, all outputs in inference."""
    returned: Returned | None = None
    """All that the model returned; of tensors that are not outputs, what a run kept of them."""
    repeats: Mapping[int, int] = field(default_factory=dict)
    """Calls that do once more what another did, with that one."""
    unseen: str = ""
    """Effects of the step beyond its calls, without which they would compute something else."""

    @cached_property
    def draws(self) -> dict[int, int]:
        """Calls that draw random numbers, with their position among those.

        One that does again what another did draws the same.
        """
        drawing = [index for index, call in enumerate(self.calls) if call.draws]
        firsts = (index for index in drawing if index not in self.repeats)
        found = {index: draw for draw, index in enumerate(firsts)}
        return {index: found[self.repeats.get(index, index)] for index in drawing}

    @property
    def parameters(self) -> dict[str, int]:
        """Names of the parameters to their tensor numbers."""
        return self._sources(Role.PARAMETER)

    @property
    def buffers(self) -> dict[str, int]:
        """Names of the buffers to their tensor numbers."""
        return self._sources(Role.BUFFER)

    @property
    def inputs(self) -> dict[str, int]:
        """Names of the tensors of the batch to their numbers."""
        return self._sources(Role.INPUT)

    def _sources(self, role: Role) -> dict[str, int]:
        return {name: t for t, name in self.names.items() if self.tensors[t].role == role}
