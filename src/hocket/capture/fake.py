"""Make fake copies of the tensors of a model and its batch: shapes without memory.

Only shapes, strides and dtypes are read, so the originals may be real, meta or fake tensors. Copies
of tensors that share a storage also share a storage, so tied weights stay tied. On a CUDA device
the weights of a recurrent layer share one storage, in cuDNN's layout, unless `lay_apart` is used.
The file also enumerates the tensors of models and batches, and adds a fake-tensor implementation of
grouped matrix products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.capture.assemble import unique_names
from hocket.capture.recording import has_storage
from hocket.capture.recurrent import know, know_recurrent_layers
from hocket.graph import Role

# Fake-tensor implementation of grouped products (rows sorted by expert).
#
# PyTorch's kernel supports all floating dtypes, but its own fake implementation only bfloat16, so a
# mixture of experts in float32 could not be recorded.

_ALIGNMENT_BYTES = 16
"""Result rows begin at multiples of this many bytes in CUDA builds of PyTorch."""


@cache
def know_grouped_products() -> None:
    """Register a fake-tensor implementation of grouped matrix products for every dtype."""
    aten: Any = torch.ops.aten
    know(aten._grouped_mm.default, _product)


def _product(
    mode: Any, func: Any, rows: Any, matrices: Any, offs: Any = None, bias: Any = None,
    out_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    if rows.dtype == matrices.dtype == torch.bfloat16:
        return NotImplemented
    dtype = out_dtype or rows.dtype
    is_batch = rows.dim() == matrices.dim()
    shape = [rows.shape[-2], matrices.shape[-1]]
    if is_batch:
        shape = [len(offs) if rows.dim() == 2 else len(rows), *shape]
    width = shape[-1]
    if torch.version.cuda:
        unit = _ALIGNMENT_BYTES // dtype.itemsize
        width = -(-width // unit) * unit
    stride = [shape[-2] * width, width, 1] if is_batch else [width, 1]
    return rows.new_empty_strided(shape, stride, dtype=dtype)


NamedTensor = tuple[str, Role, torch.Tensor]


def fake_mode(model: nn.Module) -> FakeTensorMode:
    """Fake tensor mode in which the model's ops run without memory."""
    know_recurrent_layers()
    know_grouped_products()
    # Models may use real constants that are neither parameters nor buffers.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # The mode's cache of results does not represent that two results are the same tensor, or that a
    # layer stands in for an accelerator's. A second pass of recurrent layers would then differ.
    mode.cache_enabled = not any(isinstance(each, nn.RNNBase) for each in model.modules())
    return mode


def model_tensors(model: nn.Module) -> Iterator[NamedTensor]:
    """Parameters, buffers and tensors held as plain attributes, each once."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        seen.add(id(parameter))
        yield name, Role.PARAMETER, parameter
    for name, buffer in model.named_buffers():
        seen.add(id(buffer))
        yield name, Role.BUFFER, buffer
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            # `isinstance` would read `__class__`, which proxy objects compute.
            if issubclass(type(value), torch.Tensor) and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{attribute}" if path else attribute, Role.BUFFER, value


def plain_batch(batch: Any) -> Any:
    """Convert mappings of any type, such as a tokenizer's result, to a dict."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def batch_tensors(batch: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a batch with their names: dict keys, or positions in tuples."""
    if isinstance(batch, torch.Tensor):
        yield prefix or "input", batch
    elif isinstance(batch, list | tuple | dict):
        items = batch.items() if isinstance(batch, dict) else enumerate(batch)
        for key, item in items:
            place = str(key) if isinstance(batch, dict) or prefix else f"input.{key}"
            yield from batch_tensors(item, f"{prefix}.{key}" if prefix else place)


def all_tensors(model: nn.Module, batch: Any) -> list[NamedTensor]:
    """Tensors that exist before a step, the model's first, each with a unique name."""
    found = [*model_tensors(model)]
    found += [(name, Role.INPUT, tensor) for name, tensor in batch_tensors(batch)]
    names = unique_names(name for name, _, _ in found)
    return [(name, role, tensor) for name, (_, role, tensor) in zip(names, found, strict=True)]


def flat_weights(model: nn.Module) -> list[list[torch.Tensor]]:
    """Weights of each recurrent layer in cuDNN's order: biases last."""
    return [
        sorted((w for w in layer._flat_weights if w is not None), key=lambda w: w.dim() < 2)
        for layer in model.modules()
        if isinstance(layer, nn.RNNBase)
    ]


def lay_apart(model: nn.Module) -> None:
    """Move weights of recurrent layers that share one buffer into separate storages.

    Streamed parameters are fetched separately; cuDNN then packs them into a buffer for each call.
    """
    for row in flat_weights(model):
        sharing = Counter(weight.untyped_storage()._cdata for weight in row)
        for weight in row:
            if sharing[weight.untyped_storage()._cdata] > 1:
                weight.data = weight.data.clone()


def fake_twins(
    tensors: Sequence[torch.Tensor], device: str, flat: Iterable[Sequence[torch.Tensor]] = ()
) -> dict[int, Any]:
    """Fake tensors by the id of their originals; must be called inside a FakeTensorMode.

    Tensors listed in ``flat`` are laid out one after the other in one storage, unless some of them
    share a storage already.
    """
    distinct = {id(tensor): tensor for tensor in tensors}
    if not all(map(has_storage, distinct.values())):
        raise TypeError("the batch or the model has a sparse or nested tensor")
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in distinct.values():
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    twins: dict[int, Any] = {}
    with torch.no_grad():
        for row in flat:
            keys = [t.untyped_storage()._cdata for t in row]
            if all(len(by_storage.get(key, ())) == 1 for key in keys) and _is_one_kind(row):
                for key in keys:
                    del by_storage[key]
                data = _one_after_the_other(row, device)
                twins |= {id(t): dressed(t, fake) for t, fake in zip(row, data, strict=True)}
        for sharing in by_storage.values():
            data = _fake_data(sharing, device)
            twins |= {id(t): dressed(t, fake) for t, fake in zip(sharing, data, strict=True)}
    return twins


def _is_one_kind(row: Sequence[torch.Tensor]) -> bool:
    return len({t.dtype for t in row}) == 1 and all(t.is_contiguous() for t in row)


def _one_after_the_other(row: Sequence[torch.Tensor], device: str) -> list[torch.Tensor]:
    flat = torch.empty(sum(t.numel() for t in row), dtype=row[0].dtype, device=device)
    parts = torch.split(flat, [t.numel() for t in row])
    return [part.view(t.shape) for part, t in zip(parts, row, strict=True)]


def meta_twins(tensors: Sequence[torch.Tensor]) -> dict[int, Any]:
    """Meta tensors by the id of their originals, for inspection only."""
    twins: dict[int, Any] = {}
    with torch.no_grad():
        for t in tensors:
            data = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
            twins[id(t)] = dressed(t, data)
    return twins


def _fake_data(sharing: list[torch.Tensor], device: str) -> list[torch.Tensor]:
    """Fake tensors that share one storage."""
    first = sharing[0]
    if len(sharing) == 1 and first.storage_offset() == 0:
        return [torch.empty_strided(first.shape, first.stride(), dtype=first.dtype, device=device)]
    storage = first.untyped_storage()
    flat = torch.empty(storage.nbytes(), dtype=torch.uint8, device=device)
    return [
        flat[: storage.nbytes() // t.dtype.itemsize * t.dtype.itemsize]
        .view(t.dtype)
        .as_strided(t.shape, t.stride(), int(t.storage_offset()))
        for t in sharing
    ]


def dressed(tensor: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """Return the fake tensor as the original's type: a parameter, or a leaf tensor."""
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        # Ops of gradient hooks are part of the step, so hooks move to the fake parameter.
        for hook in (tensor._backward_hooks or {}).values():
            twin.register_hook(hook)  # type: ignore[no-untyped-call]
        return twin
    return fake.detach().requires_grad_(tensor.requires_grad and tensor.is_leaf)


def map_batch(batch: Any, twins: dict[int, Any]) -> Any:
    """The batch with its tensors replaced."""
    if isinstance(batch, torch.Tensor):
        return twins[id(batch)]
    if isinstance(batch, dict):
        return {key: map_batch(item, twins) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        items = [map_batch(item, twins) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
