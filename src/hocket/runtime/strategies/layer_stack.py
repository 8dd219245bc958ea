"""The layer stack of a model: its longest list of modules.

Most models are a list of equal blocks between an input and an output part, such as
``model.transformer.h``. `find_stack` returns the longest `nn.Sequential` or `nn.ModuleList`, and
`layer_of` the number of the layer that contains a module.
"""

from __future__ import annotations

import re

from torch import nn

from hocket.base.errors import UsageError

_NUMBERED = re.compile(r"[0-9]+")


def find_stack(model: nn.Module) -> tuple[str, int]:
    """Return path and length of the longest list of modules; of equal ones the outermost."""
    found = _lists(model)
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no list of layers that a pipeline could cut",
            hint="keep its layers in nn.Sequential or nn.ModuleList, or plan without a pipeline: "
            "hocket parallel … --fix pipeline=1",
        )
    # `max` returns the first of equal entries, and `named_modules` yields outer modules first.
    length, path = max(found, key=lambda entry: entry[0])
    return path, length


def layer_paths(model: nn.Module) -> list[str]:
    """Return the paths of the layers of the longest list; empty without a list."""
    length, path = max(_lists(model), key=lambda entry: entry[0], default=(0, ""))
    return [f"{path}.{number}" if path else str(number) for number in range(length)]


def _lists(model: nn.Module) -> list[tuple[int, str]]:
    """Return length and path of every list of modules."""
    return [
        (len(children), path)
        for path, module in model.named_modules()
        if (children := list(module.named_children()))
        and all(_NUMBERED.fullmatch(name) for name, _ in children)
        and isinstance(module, nn.Sequential | nn.ModuleList)
    ]


def layer_of(module: str, stack: str) -> int | None:
    """Return the number of the layer that a module is part of; None outside the stack."""
    prefix = f"{stack}." if stack else ""
    if not module.startswith(prefix):
        return None
    first = module[len(prefix) :].partition(".")[0]
    return int(first) if _NUMBERED.fullmatch(first) else None
