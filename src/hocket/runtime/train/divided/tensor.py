"""Tensor parallelism of a person's transformer layers: matrices by columns, then by rows.

As Megatron-LM divides a block (Shoeybi et al., 2019), attention and MLP widen by a matrix whose
columns are divided and narrow by one whose rows are, so that each needs one sum forward and one
backward. Which matrices those are is known by the names that families of models give them. A layer
that has anything else is refused: a weight that is used on parts without a rule would train
wrongly. Embeddings and the output layer stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hocket.base.errors import UsageError
from hocket.runtime.train.cuts import TensorCut
from hocket.runtime.train.divided.collectives import joined, spread
from hocket.runtime.train.divided.stack import find_stack
from hocket.transformer.families import FAMILIES, Family, named_family, without_rule

_COUNTED = (
    "split_size",
    "num_heads",
    "num_attention_heads",
    "num_key_value_heads",
    "all_head_size",
)
"""Attributes of attention modules that count what a rank has a part of."""


def divide_layers(model: nn.Module, group: Any, rank: int, degree: int) -> dict[int, TensorCut]:
    """Divide all layers of a model in place; the cuts by the id of the parameters."""
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
        extent = weight.shape[dim] // blocks
        unit = width if name.startswith(module) else 1
        if extent % (degree * unit):
            what = f"{extent // unit} heads" if unit > 1 else f"a width of {extent}"
            raise UsageError(
                f"{path}.{name} has {what}, which {degree} tensor-parallel ranks cannot share",
                hint="choose a tensor degree that divides it",
            )


def _weight(module: nn.Module) -> tuple[nn.Parameter, int]:
    """The matrix of a layer, and its dimension of outputs: Hugging Face's Conv1D has it last."""
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
        return plain(self, spread(x, group))

    return forward


def _row_forward(group: Any, dim: int) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        product = functional.linear(x, self.weight) if dim == 0 else x @ self.weight
        total = joined(product, group)
        # The bias is whole on every rank, so it is added after the sum.
        return total if self.bias is None else total + self.bias

    return forward
