"""Record of one step: calls on numbered values, before versions and names are given.

A value is a view of one storage: (storage, shape, stride, offset, dtype). Two tensors
that view the same bytes with the same layout are the same value, whatever Python object holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from hocket.graph import Phase, Role


class Ref(NamedTuple):
    """Stands for a tensor in the arguments of a call."""

    number: int


class Constant(NamedTuple):
    """A tensor that the model holds outside its parameters and buffers, kept by value."""

    tensor: torch.Tensor


class TensorLayout(NamedTuple):
    """Layout of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    lazy: tuple[bool, bool] = (False, False)
    """Pending conjugation and negation."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def size_bytes(self) -> int:
        """Bytes of the elements, as a transfer would move them."""
        return self.num_elements * self.dtype.itemsize

    @property
    def end_bytes(self) -> int:
        """Where the last element ends in the storage."""
        if self.num_elements == 0:
            return 0
        steps = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (self.offset + steps + 1) * self.dtype.itemsize

    @property
    def touched_bytes(self) -> int:
        """Bytes of storage that one pass over the elements touches: broadcast ones once."""
        count = 1
        for extent, stride in zip(self.shape, self.stride, strict=True):
            count *= extent if stride else min(extent, 1)
        return count * self.dtype.itemsize


class Value(NamedTuple):
    """A view of one storage."""

    storage: int
    layout: TensorLayout


class Cost(NamedTuple):
    """Cost of a call as far as its shapes determine it."""

    kind: str
    signature: str
    dtype: int
    flops: float
    bytes_touched: int


class RawCall(NamedTuple):
    """One recorded call. All numbers are values, but ``partner`` is a call."""

    function: Any
    """An OpOverload, or the name of an optimizer."""
    args: Any
    kwargs: dict[str, Any]
    reads: tuple[int, ...]
    outputs: tuple[int | None, ...]
    """Flattened results; None where a result is not a tensor."""
    writes: tuple[int, ...]
    phase: Phase
    module: str
    partner: int
    draws: bool
    """True if the call draws random numbers."""
    is_view: bool
    cost: Cost

    @property
    def made(self) -> tuple[int, ...]:
        """Values that it makes or changes."""
        return (*(number for number in self.outputs if number is not None), *self.writes)


class Source(NamedTuple):
    """A value that exists before the step."""

    name: str
    role: Role
    value: int


class Returned(NamedTuple):
    """Output of the model: its nesting, and its leaves with `Ref` for tensors."""

    form: Any
    leaves: tuple[Any, ...]


@dataclass
class Recording:
    """A linear record of one step."""

    storage_bytes: list[int] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    producer: list[int] = field(default_factory=list)
    """Call that first made each value; -1 for sources."""
    sources: list[Source] = field(default_factory=list)
    calls: list[RawCall] = field(default_factory=list)
    gradients: dict[int, int] = field(default_factory=dict)
    """Parameter value to the value of its final gradient."""
    outputs: list[int] = field(default_factory=list)
    """Results for the user: the loss in training, all outputs in inference."""
    returned: Returned | None = None
    num_calls: Counter[str] = field(default_factory=Counter)
    """Of each module in the forward pass, by path."""
    held: list[tuple[int, int]] = field(default_factory=list)
    """Calls and storages that their autograd nodes hold though nobody reads them any more."""
    unseen: str = ""
    """Effects of the step beyond its calls, without which they would compute something else."""


def has_storage(tensor: torch.Tensor) -> bool:
    """False for sparse and nested tensors: their elements lie in several storages."""
    return tensor.layout == torch.strided and not tensor.is_nested


def map_tree(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Arguments with ``change`` applied to every leaf; lists stay lists, tuples tuples."""
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
    """The results of a call, with lists of tensors opened."""
    if isinstance(result, list | tuple):
        return [leaf for item in result for leaf in flat_results(item)]
    return [result]
