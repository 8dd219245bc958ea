"""Tensor parallelism of transformer layers: matrices split by columns, then by rows.

As in Megatron-LM (Shoeybi et al., 2019), the first matrices of attention and MLP are split by
columns and the last one by rows, so that each block needs one all-reduce forward and one backward.
The matrices are found by the module names of known model families. Layers with any other weight are
refused, because a weight without a rule would get a wrong gradient from sharded inputs. Embeddings
and the output layer are replicated. Collectives are ops that tracing records, and the shards are
plain tensors.

Torch's `parallelize_module` is not used: it gives equal losses for llama and bert, but refuses
Hugging Face's Conv1D (gpt2) and has no fused projections (`benchmarks/runtime/torch_engines.py`),
and a model with DTensors cannot be traced, which pipelines and CUDA graphs need.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hocket.base.errors import UsageError
from hocket.runtime.checkpoint import TensorCut
from hocket.runtime.strategies.layer_stack import find_stack
from hocket.transformer.families import FAMILIES, Family, named_family, without_rule

_COUNTED = (
    "split_size",
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "all_head_size",
)
"""Attributes of attention modules with head counts or widths, divided by the degree on a rank."""


def shard_layers(model: nn.Module, group: Any, rank: int, degree: int) -> dict[int, TensorCut]:
    """Shard all layers of a model in place; return the split of each parameter, by its id."""
    stack, num_layers = find_stack(model)
    cuts: dict[int, TensorCut] = {}
    for number in range(num_layers):
        path = f"{stack}.{number}" if stack else str(number)
        layer = model.get_submodule(path)
        family = _family(layer, path)
        _require_heads(layer, family, path, degree)
        for name, blocks in family.columns.items():
            _columns(layer.get_submodule(name), group, blocks, degree, cuts)
        for name in family.rows:
            _rows(layer.get_submodule(name), group, degree, cuts)
        attention = layer.get_submodule(family.head_width[0])
        for attribute in _COUNTED:
            value = getattr(attention, attribute, None)
            if isinstance(value, int):
                setattr(attention, attribute, value // degree)
    with torch.no_grad():
        for parameter in model.parameters():
            cut = cuts.get(id(parameter))
            if cut is not None:
                parameter.data = cut.piece(parameter.data, rank)
    return cuts


def _family(layer: nn.Module, path: str) -> Family:
    family = named_family({name for name, _ in layer.named_modules()})
    if family is None:
        known = ", ".join(dict.fromkeys(family.name for family in FAMILIES))
        raise UsageError(
            f"the layers {path!r} have names that tensor parallelism has no rule for",
            hint=f"known are those of {known}; or plan without it: hocket parallel … --fix "
            "tensor=1",
        )
    if name := without_rule(family, [name for name, _ in layer.named_parameters()]):
        raise UsageError(
            f"{path}.{name} is used on parts of a layer, and tensor parallelism has no rule "
            "for its gradient",
            hint="plan without it: hocket parallel … --fix tensor=1",
        )
    return family


def _require_heads(layer: nn.Module, family: Family, path: str, degree: int) -> None:
    module, attribute = family.head_width
    width = getattr(layer.get_submodule(module), attribute)
    for name, blocks in family.columns.items():
        weight, dim = _weight(layer.get_submodule(name))
        # Heads must not be cut; matrices outside of attention are cut at any column.
        extent = weight.shape[dim] // blocks
        unit = width if name.startswith(module) else 1
        if extent % (degree * unit):
            what = f"{extent // unit} heads" if unit > 1 else f"a width of {extent}"
            raise UsageError(
                f"{path}.{name} has {what}, which {degree} tensor-parallel ranks cannot split",
                hint="choose a tensor degree that divides it",
            )


def _weight(module: nn.Module) -> tuple[nn.Parameter, int]:
    """Return the weight of a layer and its output dimension; Hugging Face's Conv1D has it last."""
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return weight, 0 if isinstance(module, nn.Linear) else 1


def _columns(
    module: nn.Module, group: Any, blocks: int, degree: int, cuts: dict[int, TensorCut]
) -> None:
    weight, dim = _weight(module)
    cuts[id(weight)] = TensorCut(dim, degree, blocks)
    if isinstance(module.bias, nn.Parameter):
        cuts[id(module.bias)] = TensorCut(0, degree, blocks)
    for attribute in ("out_features", "nf"):
        if hasattr(module, attribute):
            setattr(module, attribute, getattr(module, attribute) // degree)
    module.forward = MethodType(_column_forward(type(module).forward, group), module)


def _rows(module: nn.Module, group: Any, degree: int, cuts: dict[int, TensorCut]) -> None:
    weight, dim = _weight(module)
    cuts[id(weight)] = TensorCut(1 - dim, degree)
    if isinstance(module, nn.Linear):
        module.in_features //= degree
    module.forward = MethodType(_row_forward(group, dim), module)


def _column_forward(plain: Callable[..., torch.Tensor], group: Any) -> Callable[..., torch.Tensor]:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return plain(self, copy_to_ranks(x, group))

    return forward


def _row_forward(group: Any, dim: int) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        product = functional.linear(x, self.weight) if dim == 0 else x @ self.weight
        total = sum_over_ranks(product, group)
        # Every rank has the full bias: added before the sum, it would count once per rank.
        return total if self.bias is None else total + self.bias

    return forward


# ── collectives inside a forward pass, as ops that can be traced ─────────────────────────────────


def _all_reduce(tensor: torch.Tensor, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    reduced: torch.Tensor = ops.wait_tensor(ops.all_reduce(tensor.contiguous(), "sum", group))
    return reduced


class _AllReduce(torch.autograd.Function):
    """An all-reduce in the forward pass, in the backward pass, or in both."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, group: str, is_forward: bool, is_backward: bool
    ) -> torch.Tensor:
        context.group, context.is_backward = group, is_backward
        return _all_reduce(x, group) if is_forward else x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        if context.is_backward:
            gradient = _all_reduce(gradient, context.group)
        return gradient, None, None, None


def _apply(x: torch.Tensor, group: Any, *, forward: bool, backward: bool) -> torch.Tensor:
    found: torch.Tensor = _AllReduce.apply(x, group.group_name, forward, backward)  # type: ignore[no-untyped-call]
    return found


def all_reduce_both(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum statistics over ranks in the forward pass, and their gradients in the backward pass."""
    return _apply(x, group, forward=True, backward=True)


def sum_over_ranks(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Sum partial results over ranks (Megatron's g)."""
    return _apply(x, group, forward=True, backward=False)


def copy_to_ranks(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return a replicated tensor unchanged (Megatron's f); its gradient is summed over ranks."""
    return _apply(x, group, forward=False, backward=True)
