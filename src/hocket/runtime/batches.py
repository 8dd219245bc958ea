"""Signatures of batches, comparisons with the planned batch, and padding.

A signature consists of the layouts and constants of a batch; batches with the same signature are
computed by the same traced step. This file also moves batches to a device, normalizes the memory
layout of their tensors, and describes how a batch differs from the planned one. `PadTo` pads
batches to few shapes, so that few steps are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import gt
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from hocket.base.errors import UsageError
from hocket.capture.fake import batch_tensors, map_batch, plain_batch
from hocket.capture.recording import has_storage

Padding = Callable[[Any], Any]
"""Pads a batch to one of few shapes."""


class BatchTensor(NamedTuple):
    """Layout of one tensor of a batch."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    twin: int
    """Position of the first entry with the same tensor object: labels are often the inputs."""


class Signature(NamedTuple):
    """Layouts of a batch's tensors, and its other values, which are constants of a traced step."""

    parts: tuple[BatchTensor, ...]
    constants: tuple[tuple[str, str], ...]


def settled(batch: Any) -> Any:
    """Clone tensors that are views of larger storages, so that only shapes distinguish batches.

    Mappings of any type become dicts.
    """
    batch = plain_batch(batch)
    own: dict[int, torch.Tensor] = {}
    made: dict[tuple[Any, ...], torch.Tensor] = {}
    for _, tensor in batch_tensors(batch):
        if not has_storage(tensor):
            own[id(tensor)] = tensor
            continue
        # Equal views stay one tensor in the batch: labels are often the inputs.
        look = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        if look not in made:
            made[look] = tensor if _is_whole(tensor) else tensor.clone()
        own[id(tensor)] = made[look]
    return map_batch(batch, own)


def on_device(batch: Any, device: torch.device) -> Any:
    """Move a batch to a device; mappings of any type become dicts."""
    return brought(plain_batch(batch), device)


def brought(tree: Any, device: torch.device) -> Any:
    """Move the tensors of nested containers to a device."""
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)


def detached(tree: Any) -> Any:
    """Detach the outputs of a model from autograd."""
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, tree)


def _is_whole(tensor: torch.Tensor) -> bool:
    num_bytes = tensor.numel() * tensor.itemsize
    return tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == num_bytes


def signature_of(batch: Any) -> Signature:
    """Return the signature of a batch."""
    batch = plain_batch(batch)
    first: dict[int, int] = {}
    parts = []
    for position, (name, tensor) in enumerate(batch_tensors(batch)):
        twin = first.setdefault(id(tensor), position)
        stride = tensor.stride() if has_storage(tensor) else ()
        parts.append(BatchTensor(name, tuple(tensor.shape), stride, tensor.dtype, twin))
    return Signature(tuple(parts), tuple(_constants(batch)))


def _constants(batch: Any, prefix: str = "input") -> Iterator[tuple[str, str]]:
    if isinstance(batch, dict | list | tuple):
        items = batch.items() if isinstance(batch, dict) else enumerate(batch)
        for key, item in items:
            yield from _constants(item, f"{prefix}.{key}")
    elif not isinstance(batch, torch.Tensor):
        yield prefix, repr(batch)


def difference(first: Signature, now: Signature) -> str:
    """Describe a difference from the planned batch other than sizes; empty if there is none."""
    before, found = ({part.name: part for part in s.parts} for s in (first, now))
    for name in before:
        if name not in found:
            return f"the batch has no {name!r}"
    for name, part in found.items():
        if name not in before:
            return f"the batch has {name!r}, which was not planned"
        planned = before[name]
        if part.dtype != planned.dtype:
            return f"{name!r} is of type {_dtype(part)}, planned was {_dtype(planned)}"
        if len(part.shape) != len(planned.shape):
            return f"{name!r} has {len(part.shape)} dimensions, planned were {len(planned.shape)}"
    return ""


def require_alike(planned: Signature, now: Signature) -> None:
    """Refuse a batch that differs from the planned one in more than sizes."""
    if what := difference(planned, now):
        raise UsageError(
            f"{what}; planned: {shapes_text(planned)}",
            hint="give batches like the one that was prepared, or prepare again",
        )


def larger_batch_warning(planned: Signature, now: Signature) -> str:
    """Describe a batch that is larger than the planned one; empty if it is not.

    Refuses a batch that differs from the planned one in more than sizes.
    """
    require_alike(planned, now)
    if not is_larger(now, planned):
        return ""
    return (
        f"a batch that is larger than the planned one ({shapes_text(now)}; planned: "
        f"{shapes_text(planned)}) may need more memory than predicted"
    )


def order_changed_warning(name: str) -> str:
    """Describe steps that call blocks in another order than the last step."""
    return (
        f"steps of {name} do not call the same modules in the same order; what was not prefetched "
        "is fetched on demand, with the same numbers"
    )


def _dtype(part: BatchTensor) -> str:
    return str(part.dtype).removeprefix("torch.")


def is_larger(now: Signature, before: Signature) -> bool:
    """True if a dimension of ``now`` is larger than in ``before``, or the tensors do not match."""
    own, other = ([part.shape for part in each.parts] for each in (now, before))
    return len(own) != len(other) or any(
        len(here) != len(there) or any(map(gt, here, there))
        for here, there in zip(own, other, strict=True)
    )


def shapes_text(signature: Signature) -> str:
    """Format the shapes of a batch."""
    return ", ".join(f"{part.name} {list(part.shape)}" for part in signature.parts)


@dataclass(frozen=True)
class PadTo:
    """Pads tensors along one dimension to the next multiple.

    ``values`` maps names of tensors to padding values, such as ``{"labels": -100}``; other tensors
    are padded with 0. ``names`` selects the tensors to pad; without it, all tensors that have the
    dimension are padded.
    """

    multiple: int
    dim: int = 1
    values: Mapping[str, float] = field(default_factory=dict)
    names: Sequence[str] | None = None

    def __call__(self, batch: Any) -> Any:
        """Return the padded batch."""
        batch = plain_batch(batch)
        filled = {}
        for name, tensor in batch_tensors(batch):
            is_meant = name in self.names if self.names is not None else tensor.dim() > self.dim
            filled[id(tensor)] = self._filled(name, tensor) if is_meant else tensor
        return map_batch(batch, filled)

    def _filled(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.dim() <= self.dim < tensor.dim():
            raise UsageError(
                f"{name!r} has {tensor.dim()} dimensions and cannot be filled along {self.dim}",
                hint="name the tensors to fill up: PadTo(…, names=[…])",
            )
        # A negative dimension counts from the end.
        dim = self.dim % tensor.dim()
        missing = -tensor.shape[dim] % self.multiple
        if not missing:
            return tensor
        pads = [0, 0] * (tensor.dim() - dim - 1) + [0, missing]
        return torch.nn.functional.pad(tensor, pads, value=self.values.get(name, 0))
