"""Memory plans with one policy for all blocks of a model, found by its modules alone.

Blocks are the members of the outermost lists of modules (layers of a transformer, stages of a
convolutional net) and whatever modules with parameters are outside of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from hocket.base.errors import UsageError
from hocket.plan.sections.memory import Memory, MemoryBlock


def uniform(model: nn.Module, budget_bytes: int, *, loss_chunks: int = 1, **policy: Any) -> Memory:
    """All blocks under one policy, on one device."""
    names = list(block_names(model))
    if not names:
        raise UsageError(
            f"{type(model).__name__} has no modules to keep within a budget",
            hint="give its layers modules of their own",
        )
    blocks = tuple(MemoryBlock(name=name, **policy) for name in names)
    return Memory(budget_bytes=(budget_bytes,), blocks=blocks, loss_chunks=loss_chunks)


def block_names(model: nn.Module) -> Iterator[str]:
    """Paths of the blocks, in the order of the modules."""
    yield from _under(model, "")


def _under(module: nn.Module, path: str) -> Iterator[str]:
    has_lists = any(_is_list(inner) for inner in module.modules() if inner is not module)
    for name, child in module.named_children():
        place = f"{path}.{name}" if path else name
        is_member = _is_list(module) and bool(path or not has_lists)
        if is_member or not _has_list(child):
            if is_member or any(True for _ in child.parameters()):
                yield place
        else:
            yield from _under(child, place)


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1


def _has_list(module: nn.Module) -> bool:
    return any(_is_list(inner) for inner in module.modules())
