"""Give meta-device models real weights, so that they can be run.

There are two ways. `BuiltForReal` replaces the meta device by the CPU while a function builds its
model, so that the function's own code initializes weights and buffers. `made_real` copies an
existing model and calls ``reset_parameters`` of each module with meta tensors; a module without
this method is refused, and the error names it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hocket.base.errors import UsageError
from hocket.capture.fake import all_tensors, batch_tensors, map_batch


class BuiltForReal(TorchFunctionMode):
    """Mode in which requests for the meta device get the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` with the CPU in place of the meta device."""
        kwargs = dict(kwargs or {})
        if "device" in kwargs and _is_meta(kwargs["device"]):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_meta(item) else item for item in args)
        return func(*args, **kwargs)


def made_real(model: nn.Module, batch: Any, seed: int) -> tuple[nn.Module, Any]:
    """The model and batch if they are real, otherwise copies initialised from ``seed``."""
    if any(tensor.is_meta for _, _, tensor in all_tensors(model, batch)):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            return _real_model(model), _real_batch(batch)
    return model, batch


def _real_model(model: nn.Module) -> nn.Module:
    lost = [name for name, tensor in _without_maker(model) if tensor.is_meta]
    if lost:
        raise UsageError(
            f"{lost[0]!r} was built on the meta device, and its module cannot make it again",
            hint="build the model on the CPU, or name a function that builds it "
            "(package.module:function)",
        )
    real = copy.deepcopy(model)
    for module in real.modules():
        if any(tensor.is_meta for tensor in _own(module)):
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()  # type: ignore[operator]
    return real


def _without_maker(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of modules that have no ``reset_parameters``."""
    for path, module in model.named_modules():
        if not callable(getattr(module, "reset_parameters", None)):
            named = (*module.named_parameters(path, False), *module.named_buffers(path, False))
            yield from named


def _own(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _real_batch(batch: Any) -> Any:
    """Real batch of the same shapes: random floats, and zeros for integers, which are valid
    indices."""
    made: dict[int, torch.Tensor] = {}
    for _, tensor in batch_tensors(batch):
        drawn = torch.randn if tensor.is_floating_point() else torch.zeros
        shape, dtype = tensor.shape, tensor.dtype
        made[id(tensor)] = drawn(shape, dtype=dtype) if tensor.is_meta else tensor
    return map_batch(batch, made)


def _is_meta(item: Any) -> bool:
    return item == "meta" or (isinstance(item, torch.device) and item.type == "meta")
