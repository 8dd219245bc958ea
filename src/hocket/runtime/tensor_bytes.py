"""Pack tensors into bytes for transfers between devices, and unpack them with their strides.

Only distinct elements are sent: broadcast dimensions are expanded again on arrival. The received
tensor has the original strides if they need at most twice the bytes of its elements. Otherwise, as
for a small slice of a large tensor, it is dense with the same order of dimensions in memory. If a
reader addresses the storage itself (`as_strided`), the entire storage is sent.
"""

from __future__ import annotations

from typing import Any

import torch

from hocket.capture.program import Call, Program, TensorSpec
from hocket.capture.recording import TensorLayout
from hocket.capture.storage import look_at, storage_bytes

_MAX_GAPS = 2
"""Maximum memory of a tensor with its original strides, as a multiple of its elements' bytes."""
_BY_ADDRESS = ("aten.as_strided", "aten.as_strided_", "aten.as_strided_scatter")


def needs_storage(program: Program, tensor: int, readers: list[int]) -> bool:
    """True if a reader may access bytes of the storage outside of the tensor's elements."""
    spec = program.tensors[tensor]
    if spec.layout is None or _is_all_of(spec):
        return False
    return any(_addresses(program.calls[reader]) for reader in readers)


def _addresses(call: Call) -> bool:
    return call.cost.kind in _BY_ADDRESS


def _is_all_of(spec: TensorSpec) -> bool:
    layout = spec.layout
    assert layout is not None
    is_dense = _strides(layout) == _real_strides(layout)
    return layout.offset == 0 and is_dense and layout.end_bytes >= spec.storage_bytes


def package_bytes(spec: TensorSpec, whole: bool) -> int:
    """Return the size of a transfer; a control tensor, which only orders ops, has no bytes."""
    if spec.layout is None:
        return 0
    if whole:
        return spec.storage_bytes // spec.layout.dtype.itemsize * spec.layout.dtype.itemsize
    return spec.layout.touched_bytes


def pack(tensor: torch.Tensor, spec: TensorSpec, whole: bool) -> torch.Tensor:
    """Return the bytes of a tensor; they may be a view of it."""
    assert spec.layout is not None
    if whole:
        return storage_bytes(tensor, package_bytes(spec, whole))
    tensor = tensor.resolve_conj().resolve_neg()
    for dim, (extent, stride) in enumerate(zip(spec.layout.shape, spec.layout.stride, strict=True)):
        if not stride and extent > 1:
            tensor = tensor.narrow(dim, 0, 1)
    dense = tensor.permute(_by_stride(spec.layout)).contiguous()
    # A single element counts as contiguous whatever its strides are; bytes need a stride of one.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def unpack(data: torch.Tensor, spec: TensorSpec, whole: bool) -> torch.Tensor:
    """Return the tensor of received bytes."""
    layout = spec.layout
    assert layout is not None
    if whole:
        return look_at(data, layout)
    dense = torch.as_strided(data.view(layout.dtype), layout.shape, _strides(layout))
    if _strides(layout) == _real_strides(layout) or not _keeps_strides(layout):
        return dense
    spaced = torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=data.device
    )
    return spaced.copy_(dense)


def conformed(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    """Return the tensor with the traced strides."""
    if tensor.stride() == layout.stride:
        return tensor
    like = torch.empty_strided(
        layout.shape, layout.stride, dtype=layout.dtype, device=tensor.device
    )
    return like.copy_(tensor)


def _by_stride(layout: TensorLayout) -> list[int]:
    """Return the dimensions in memory order, the slowest one first."""
    return sorted(range(len(layout.shape)), key=lambda dim: -layout.stride[dim])


def _strides(layout: TensorLayout) -> tuple[int, ...]:
    """Return the strides of the densely packed elements; 0 for broadcast dimensions."""
    strides = [0] * len(layout.shape)
    step = 1
    for dim in reversed(_by_stride(layout)):
        if layout.stride[dim] or layout.shape[dim] == 1:
            strides[dim] = step
            step *= max(layout.shape[dim], 1)
    return _without_idle(layout, strides)


def _real_strides(layout: TensorLayout) -> tuple[int, ...]:
    return _without_idle(layout, layout.stride)


def _without_idle(layout: TensorLayout, strides: Any) -> tuple[int, ...]:
    """Return strides with 1 for dimensions of one element, so that they can be compared."""
    return tuple(1 if n == 1 else s for n, s in zip(layout.shape, strides, strict=True))


def _keeps_strides(layout: TensorLayout) -> bool:
    """True if the traced strides address each element once, with few gaps."""
    span = 1
    for dim in reversed(_by_stride(layout)):
        extent, stride = layout.shape[dim], layout.stride[dim]
        if extent == 1:
            continue
        if stride < span:
            return False
        span = stride * (extent - 1) + span
    return span <= _MAX_GAPS * max(layout.num_elements, 1)
