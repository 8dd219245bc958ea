"""Find runs of identical consecutive blocks in a model, before anything is recorded.

Children of a ModuleList or Sequential are identical when class, settings, shapes and submodules
agree; a number may differ where it counts the position, such as ``layer_idx``. A block that shares
memory with anything outside it is in no run. Only the outermost runs are returned. O(modules).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MIN_RUN = 6
"""Shortest run worth cutting: five blocks are recorded in any case."""
NUM_FIRST = 3
NUM_LAST = 2
TEMPLATE = 2
"""Of the kept blocks, the one that the copies are made from: both its neighbours are inner ones."""

_OWN_FIELDS = frozenset(vars(nn.Module()))
"""Attributes that every module has; the ones that matter are compared one by one."""


class NotRepeatable(Exception):  # noqa: N818 - an answer for capture itself, not for users
    """The blocks of a run are not alike in the recording."""


@dataclass(frozen=True)
class BlockRun:
    """Identical consecutive blocks, by their paths."""

    paths: tuple[str, ...]

    @property
    def kept(self) -> tuple[str, ...]:
        """The blocks that are recorded."""
        return self.paths[:NUM_FIRST] + self.paths[-NUM_LAST:]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The blocks that are copied from the template."""
        return self.paths[NUM_FIRST:-NUM_LAST]


def find_runs(model: nn.Module) -> list[BlockRun]:
    """The outermost runs of at least `MIN_RUN` identical blocks."""
    runs: list[BlockRun] = []
    inside: tuple[str, ...] = ()
    shared = _shared_names(model)
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or f"{path}.".startswith(inside):
            continue
        if len(module._modules) < MIN_RUN:
            continue
        for names in _identical_children(module, path, shared):
            prefix = f"{path}." if path else ""
            runs.append(BlockRun(tuple(prefix + name for name in names)))
            inside += tuple(f"{block}." for block in runs[-1].paths)
    return runs


def _shared_names(model: nn.Module) -> list[list[str]]:
    """Names of tensors that share a storage, or are one, under every path that leads to them."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers, vars(module)):
            for name, tensor in table.items():
                if isinstance(tensor, torch.Tensor):
                    storage = tensor.untyped_storage()._cdata
                    names.setdefault(storage, []).append(f"{path}.{name}" if path else name)
    return [shared for shared in names.values() if len(shared) > 1]


def _sharing(container: nn.Module, path: str, shared: list[list[str]]) -> dict[str, Any]:
    """Which tensors inside each child share memory; None for a child that shares with others."""
    prefix = f"{path}." if path else ""
    patterns: dict[str, Any] = {name: set() for name in container._modules}
    for names in shared:
        inside = [name[len(prefix) :].partition(".") for name in names if name.startswith(prefix)]
        heads = {head for head, _, _ in inside}
        if len(heads) > 1 or len(inside) < len(names):
            patterns |= dict.fromkeys(heads & patterns.keys())
        for head in heads:
            if patterns.get(head) is not None:
                patterns[head].add(tuple(rest for _, _, rest in inside))
    return patterns


def _identical_children(
    container: nn.Module, path: str, shared: list[list[str]]
) -> Iterator[list[str]]:
    children = list(container._modules.items())
    sharing = list(_sharing(container, path, shared).values())
    start = 0
    for stop in range(1, len(children) + 1):
        if (
            stop < len(children)
            and sharing[stop] is not None
            and sharing[start] == sharing[stop]
            and _same_child(children, start, stop)
        ):
            continue
        names = [name for name, _ in children[start:stop]]
        distinct = {id(child) for _, child in children[start:stop]}
        if len(names) >= MIN_RUN and len(distinct) == len(names):
            yield names
        start = stop


def _same_child(children: list[tuple[str, nn.Module | None]], first: int, other: int) -> bool:
    a, b = children[first][1], children[other][1]
    return a is not None and b is not None and _same_module(a, b, other - first)


def _same_module(a: nn.Module, b: nn.Module, distance: int) -> bool:
    if type(a) is not type(b) or a.training != b.training:
        return False
    tables = ((a._parameters, b._parameters), (a._buffers, b._buffers))
    if not all(_same_tensors(x, y) for x, y in tables):
        return False
    if list(a._modules) != list(b._modules):
        return False
    mine, other = _settings(a), _settings(b)
    if mine.keys() != other.keys():
        return False
    if not all(_same_attribute(mine[key], other[key], distance) for key in mine):
        return False
    return all(
        child is None if twin is None else child is not None and _same_module(child, twin, distance)
        for child, twin in zip(a._modules.values(), b._modules.values(), strict=True)
    )


def _settings(module: nn.Module) -> dict[str, Any]:
    hooks = {key: value for key, value in vars(module).items()
             if key.endswith("_hooks") and value}  # fmt: skip
    return hooks | {key: value for key, value in vars(module).items() if key not in _OWN_FIELDS}


def _same_tensors(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(_same_tensor(a[key], b[key]) for key in a)


def _same_tensor(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.shape, a.stride(), a.dtype, a.requires_grad) == (
        b.shape, b.stride(), b.dtype, b.requires_grad,
    )  # fmt: skip


def _same_attribute(a: Any, b: Any, distance: int) -> bool:
    # A tensor among the attributes gets a name and a place of its own, as a buffer; inside a list
    # it is taken by value, and only the same one will do.
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return _same_tensor(a, b)
    return _same_setting(a, b, distance)


def _same_setting(a: Any, b: Any, distance: int) -> bool:
    """True if two attributes agree, or count the positions of their blocks."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, int) and not isinstance(a, bool):
        return bool(a == b or b - a == distance)
    if isinstance(a, str | bytes | float | bool | complex):
        return bool(a == b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(
            _same_setting(x, y, distance) for x, y in zip(a, b, strict=True)
        )
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same_setting(a[key], b[key], distance) for key in a)
    if isinstance(a, set | frozenset | torch.Size | torch.dtype | torch.device):
        return bool(a == b)
    return False
