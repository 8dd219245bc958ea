"""Memory plans with one policy for all blocks of a model, found by its modules alone.

Blocks are the members of the outermost lists of modules (layers of a transformer, stages of a
convolutional net) and whatever modules with parameters are outside of these. A member most of whose
parameters are in a list inside it, such as that of experts, is cut by that list in its turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hocket.base.errors import UsageError
from hocket.plan.sections.memory import Memory, MemoryBlock

_FEWEST = 3
"""Members with parameters that a list inside a block has at least where it is cut by them."""


def uniform(model: nn.Module, budget_bytes: int, **policy: Any) -> Memory:
    """All blocks under one policy, on one device."""
    names = list(block_names(model))
    if not names:
        raise UsageError(
            f"{type(model).__name__} has no modules to keep within a budget",
            hint="give its layers modules of their own",
        )
    blocks = tuple(MemoryBlock(name=name, **policy) for name in names)
    return Memory(budget_bytes=(budget_bytes,), blocks=blocks)


def block_names(model: nn.Module) -> Iterator[str]:
    """Paths of the blocks, in the order of the modules."""
    yield from _under(model, "")


def _under(module: nn.Module, path: str) -> Iterator[str]:
    has_lists = any(_is_list(inner) for inner in module.modules() if inner is not module)
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        is_member = _is_list(module) and bool(path or not has_lists) and not _is_mostly_list(child)
        if is_member or not _has_list(child):
            if is_member or _has_parameters(child):
                yield place
        else:
            yield from _under(child, place)


def _is_mostly_list(module: nn.Module) -> bool:
    """True if most of a module's parameters are in one list inside it, of several members."""
    own = _num_parameters(module)
    lists = (inner for inner in module.modules() if inner is not module and _is_list(inner))
    return any(
        2 * _num_parameters(inner) > own and sum(map(_has_parameters, inner.children())) >= _FEWEST
        for inner in lists
    )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1


def _has_list(module: nn.Module) -> bool:
    return any(_is_list(inner) for inner in module.modules())
