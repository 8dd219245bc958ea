"""Data types of a recorded step: calls on numbered values, before `link` adds versions and names.

A value is a view of one storage: (storage, shape, stride, offset, dtype). Two tensors with the same
bytes and layout are the same value, even if they are different Python objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hocket.graph import Phase, Role


class Ref(NamedTuple):
    """Placeholder for a tensor in the arguments of a call."""

    number: int


class Constant(NamedTuple):
    """A tensor that the model holds outside its parameters and buffers, stored by value."""

    tensor: torch.Tensor


class TensorLayout(NamedTuple):
    """Layout of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    lazy: tuple[bool, bool] = (False, False)
    """Pending lazy conjugation and negation."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, which a transfer would move."""
        return self.num_elements * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        """Offset of the end of the last element in the storage."""
        if self.num_elements == 0:
            return 0
        steps = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (self.offset + steps + 1) * self.dtype.itemsize

    @property
    def touched_bytes(self) -> int:
        """Bytes of storage that one pass over the elements touches; broadcast elements count
        once."""
        count = 1
        for extent, stride in zip(self.shape, self.stride, strict=True):
            count *= extent if stride else min(extent, 1)
        return count * self.dtype.itemsize


class Value(NamedTuple):
    """A view of one storage."""

    storage: int
    layout: TensorLayout


class Cost(NamedTuple):
    """Cost of a call by its shapes."""

    kind: str
    signature: str
    dtype: int
    flops: float
    bytes_touched: int


class RawCall(NamedTuple):
    """One recorded call. Its numbers refer to values, except ``partner``, which is a call."""

    function: Any
    """An OpOverload, or the name of an optimizer."""
    args: Any
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    outputs: tuple[int | None, ...]
    """Flattened results; None where a result is not a tensor."""
    writes: tuple[int, ...]
    cost: Cost
    draws: bool = False
    """True if the call draws random numbers."""
    is_view: bool = False
    phase: Phase = Phase.FORWARD
    module: str = ""
    """Path of the module whose forward makes the call."""
    partner: int = -1
    """Forward call whose gradient a backward call computes."""

    @property
    def made(self) -> tuple[int, ...]:
        """Values that the call creates or changes."""
        return (*(number for number in self.outputs if number is not None), *self.writes)


class Source(NamedTuple):
    """A value that exists before the step."""

    name: str
    role: Role
    value: int


class Returned(NamedTuple):
    """Output of the model: its nesting, and leaves with `Ref` for tensors."""

    form: Any
    leaves: tuple[Any, ...]


@dataclass
class Recording:
    """Linear record of one step."""

    storage_bytes: list[int] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    producer: list[int] = field(default_factory=list)
    """Call that made each value first; -1 for sources."""
    sources: list[Source] = field(default_factory=list)
    calls: list[RawCall] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    """Value of the final gradient of each parameter's value."""
    outputs: list[int] = field(default_factory=list)
    """Results for the user: the loss in training, all outputs in inference."""
    returned: Returned | None = None
    num_calls: Counter[str] = field(default_factory=Counter)
    """Number of forward calls of each module, by its path."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """Calls with storages that their autograd nodes save although nothing reads them again."""
    repeats: dict[int, int] = field(default_factory=dict)
    """Calls that draw the random numbers of an earlier call again, with that call."""
    unseen: str = ""
    """Side effects of the step that its calls do not show; if not empty, running the calls alone
    would give other results."""


def has_storage(tensor: torch.Tensor) -> bool:
    """False for sparse and nested tensors, whose elements lie in several storages."""
    return tensor.layout == torch.strided and not tensor.is_nested


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to every leaf of the arguments; lists stay lists, tuples tuples."""
    if isinstance(tree, Ref | Constant):
        return change(tree)
    if isinstance(tree, list):
        return [map_tree(item, change) for item in tree]
    if isinstance(tree, tuple) and not isinstance(tree, torch.Size):
        return tuple(map_tree(item, change) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tree(item, change) for key, item in tree.items()}
    return change(tree)


def flat_results(result: Any) -> list[Any]:
    """Results of a call, with lists of tensors flattened."""
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in flat_results(item)]
    return [result]
