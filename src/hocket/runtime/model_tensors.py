"""The model's tensors on the devices of a plan, and checks that they were not replaced.

`ModelTensors` moves tensors to their planned devices. Tensors that are there already are not
copied, so a step writes to the memory of the user's model. All tensors that share a storage, such
as tied weights, move together. `ModelTree` detects replaced modules, tensors and hooks;
`settings_of` lists plain values of modules that the training loop may change.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.capture.fake import all_tensors
from hocket.capture.program import Program
from hocket.capture.record import layout_of
from hocket.capture.storage import look_at
from hocket.graph.graph import Role

_HELD_BY_MODEL = (Role.PARAMETER, Role.BUFFER)


class ModelTensors:
    """Parameters, buffers and plain tensors of a model by name."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.tensors = {name: tensor for name, _, tensor in all_tensors(model, ())}

    def renew(self) -> None:
        """Read the model's tensors again; the dict `tensors` is changed in place."""
        now = ModelTensors(self._model).tensors
        self.tensors.clear()
        self.tensors.update(now)

    def settle(
        self, program: Program, present: Sequence[Sequence[int]], devices: Sequence[torch.device]
    ) -> list[dict[int, torch.Tensor]]:
        """Return the model's tensors per device of the plan, moved if needed; memory is shared."""
        settled: list[dict[int, torch.Tensor]] = []
        for device, numbers in zip(devices, present, strict=True):
            here: dict[int, torch.Tensor] = {}
            for number in numbers:
                if program.tensors[number].role in _HELD_BY_MODEL:
                    tensor = self.tensors[program.names[number]]
                    if tensor.device != device:
                        self._move(tensor, device)
                    here[number] = tensor.detach()
            settled.append(here)
        return settled

    def bring(self, device: torch.device) -> None:
        """Move all tensors of the model to one device."""
        for tensor in self.tensors.values():
            if tensor.device != device:
                self._move(tensor, device)

    def _move(self, tensor: torch.Tensor, device: torch.device) -> None:
        """Move a storage to another device, with all tensors that are views of it."""
        storage = tensor.untyped_storage()
        everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        arrived = everything.to(device)
        for other in self.tensors.values():
            if other.untyped_storage()._cdata == storage._cdata:
                other.data = look_at(arrived, layout_of(other))

    def addresses(self) -> list[int]:
        """Return the address of each tensor; if one changes, traced steps need the tensors
        again."""
        return [tensor.data_ptr() for tensor in self.tensors.values()]


_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN_FIELDS = frozenset(vars(nn.Module()))


class ModelTree:
    """Snapshot of a model's modules, tensors and hooks, which detects replaced ones.

    Traced steps and copies on the host hold tensors by reference, so they would miss ``layer.weight
    = nn.Parameter(...)`` between steps.
    """

    def __init__(self, model: nn.Module, *, everything: bool = True) -> None:
        """Without ``everything`` only parameters and modules are compared."""
        modules = list(model.modules())
        names = (*_TABLES, *_HOOKS) if everything else ("_parameters", "_modules")
        self._tables = [vars(each)[name] for each in modules for name in names]
        self._attributes = [(vars(each), _tensor_names(each)) for each in modules if everything]
        self._parameters = list(model.parameters()) if everything else []
        self._held = list(self._now())
        self._layouts = list(map(_layout, self._held))

    def is_same(self) -> bool:
        """True if the model still holds the objects of the snapshot."""
        now = list(self._now())
        return len(now) == len(self._held) and all(map(operator.is_, now, self._held))

    def is_alike(self, other: ModelTree) -> bool:
        """True if another snapshot differs only in tensors, with equal layout, device and type."""
        return self._layouts == other._layouts

    def _now(self) -> Iterator[Any]:
        yield from chain.from_iterable(map(dict.values, self._tables))
        for values, names in self._attributes:
            for name in names:
                yield values.get(name)
        for parameter in self._parameters:
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                yield from (hooks or {}).values()


def _tensor_names(module: nn.Module) -> tuple[str, ...]:
    """Return ``forward`` and the names of plain attributes that are tensors or None."""
    return (
        "forward",
        *(
            name
            for name, value in vars(module).items()
            if name not in _OWN_FIELDS and (value is None or issubclass(type(value), torch.Tensor))
        ),
    )


def _layout(held: Any) -> Any:
    if isinstance(held, torch.Tensor):
        return layout_of(held), held.device, type(held)
    return id(held)


def replaced_error() -> UsageError:
    """Return the error of a strategy that cannot replace tensors while it trains."""
    return UsageError(
        "parameters or modules of the model were replaced since hocket.prepare",
        hint="write into a parameter (weight.data.copy_(...)) instead of replacing it, or call "
        "hocket.prepare again with an optimizer of the new parameters",
    )


Settings = tuple[dict[str, Any], tuple[str, ...]]
"""An attribute dict, and the names of its numbers, strings, flags and None values."""


def settings_of(modules: Iterable[nn.Module]) -> Iterator[Settings]:
    """Yield settings that a training loop may change: of modules, their configurations and
    dicts."""
    seen: set[int] = set()
    pending: list[tuple[Any, int]] = [(vars(each), 0) for each in modules]
    while pending:
        held, depth = pending.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        items = [(name, value) for name, value in dict.items(held) if name not in _OWN_FIELDS]
        yield held, tuple(n for n, v in items if v is None or issubclass(type(v), _SCALARS))
        if depth < _MAX_DEPTH:
            found = (_named_values(value) for _, value in items)
            pending += [(inner, depth + 1) for inner in found if inner is not None]


def setting_values(settings: Iterable[Settings]) -> tuple[Any, ...]:
    """Return the current values of settings; objects of other types are compared by identity."""
    values = (dict.get(held, name) for held, names in settings for name in names)
    # Not `isinstance`, which a user's class may answer by a `__class__` property.
    return tuple(each if issubclass(type(each), _SCALARS) else id(each) for each in values)


_SCALARS = (bool, int, float, str)
_MAX_DEPTH = 2
"""Maximum depth of nested configuration objects and dicts."""


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


def _named_values(value: Any) -> dict[str, Any] | None:
    """Return the attribute dict of a user's object, or the dict itself; None for other types.

    ``__getattr__`` methods of the user's classes are not called, because they may create the
    requested attribute.
    """
    kind = type(value)
    if issubclass(kind, dict):
        return cast("dict[str, Any]", value)
    if issubclass(kind, (torch.Tensor, nn.Module, type, ModuleType, *_FUNCTIONS)):
        return None
    try:
        return cast("dict[str, Any]", object.__getattribute__(value, "__dict__"))
    except AttributeError:
        return None
