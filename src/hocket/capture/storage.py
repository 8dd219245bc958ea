"""Recreate tensors that existed before a recorded step on a device, with their aliasing.

Parameters, buffers and parts of the batch may be views of the same storage: labels are often the
inputs shifted by one. Therefore entire storages are copied, and tensors become views of the copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hocket.capture.program import TensorSpec
from hocket.capture.recording import TensorLayout


def storage_bytes(tensor: torch.Tensor, num_bytes: int) -> torch.Tensor:
    """First bytes of a tensor's storage, without a copy."""
    everything = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return everything.set_(tensor.detach().untyped_storage())[:num_bytes]


def look_at(data: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    """Tensor that views a storage's bytes with the given layout."""
    size = layout.dtype.itemsize
    flat = data[: data.numel() // size * size].view(layout.dtype)
    offset = flat.storage_offset() + layout.offset
    tensor = torch.as_strided(flat, layout.shape, layout.stride, offset)
    is_conjugated, is_negated = layout.lazy
    tensor = tensor.conj() if is_conjugated else tensor
    return torch._neg_view(tensor) if is_negated else tensor


def first_tensors(
    numbers: Iterable[int],
    specs: Mapping[int, TensorSpec],
    storages: Mapping[int, torch.Tensor],
    device: torch.device,
) -> dict[int, torch.Tensor]:
    """Tensors on ``device`` before the first step; optimizer states are zeros."""
    own: dict[int, torch.Tensor] = {}
    tensors: dict[int, torch.Tensor] = {}
    for number in numbers:
        spec = specs[number]
        if spec.layout is None:
            continue
        if spec.storage not in own:
            given = storages.get(spec.storage)
            if given is None:
                given = torch.zeros(spec.layout.end_bytes, dtype=torch.uint8)
            own[spec.storage] = given.to(device, copy=True)
        tensors[number] = look_at(own[spec.storage], spec.layout)
    return tensors
