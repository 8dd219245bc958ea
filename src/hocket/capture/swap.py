"""Run a model with other tensors in place of its own, and leave no trace of it.

The tensors of the user's own model are replaced where the model holds them, rather than in a deep
copy: closures, partials and bound methods then see the replacements, too, and so does a function
that refers to the model by a global name. Everything that can be reached from the model and the
functions given with it is saved before and restored after, also when the run raises: parameters,
buffers, attributes, contents of lists and dicts, cells of closures. Globals and class attributes
that its functions name are restored where they hold other tensors than before, and caches of
`functools` are emptied where they hold fake ones.
"""

from __future__ import annotations

import functools
import gc
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

_one_at_a_time = threading.RLock()
"""A model has one set of tensors at a time."""
_LRU: type = type(functools.lru_cache(lambda: None))
_CLOSED = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
"""Packages whose objects are not looked into, other than modules and plain containers."""
_HELD_FUNCTIONS = ("forward", "loss", "given")
"""Attributes by which objects of this package hold functions of the user's."""
_MAX_DEPTH = 4
_MISSING: Any = ...

Twins = Mapping[int, torch.Tensor]
"""Replacements by the id of the tensor that they replace."""


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of Python and numpy afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def swapped_tensors(model: nn.Module, twins: Twins, *functions: Any) -> Iterator[nn.Module]:
    """Give the model, with ``twins`` in place of its tensors; restore all of it afterwards.

    ``functions`` are called with the model, and may hold its tensors and modules themselves. The
    generators of Python and numpy are restored as well; PyTorch's is not touched.
    """
    with _one_at_a_time, generators_kept():
        state = _ReachableState((model, *functions))
        try:
            state.swap(twins)
            yield model
        finally:
            state.restore()


class PythonState:
    """What a model and the functions given with it hold beside tensors, at one time."""

    def __init__(self, *roots: Any) -> None:
        self._state = _ReachableState(roots)
        self._draws = _python_draws()
        self.numbers = self._state.numbers()
        """Numbers, strings, flags and lengths of containers, in the order of a walk."""

    def has_drawn(self) -> bool:
        """True if Python's or numpy's generator has moved since."""
        return self._draws != _python_draws()

    def is_changed(self) -> bool:
        """True if any object that was held is another one now."""
        return self._state.is_changed()


def _python_draws() -> tuple[Any, ...]:
    drawn = np.random.get_state(legacy=False)
    return random.getstate(), repr(drawn["state"]["pos"]), drawn["state"]["key"].tobytes()


class _ReachableState:
    """Contents of every mutable object that can be reached from some roots."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._seen: set[int] = set()
        self._dicts: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._partials: list[tuple[Any, tuple[Any, ...]]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._named: list[tuple[Any, str, Any]] = []
        """Class attributes and globals: owner, name, value."""
        self._shared: list[tuple[Any, Any]] = []
        """Containers that such names hold, with a copy of each."""
        self._caches: list[Any] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._kept: list[Any] = []
        """Keeps ids of looked-at objects from being given to others."""
        self._pending: list[Any] = list(roots)
        while self._pending:
            self._look_at(self._pending.pop())

    # ── find ─────────────────────────────────────────────────────────────────────────────────

    def _look_at(self, item: Any) -> None:
        if id(item) in self._seen:
            return
        if isinstance(item, torch.Tensor) and item.requires_grad and item.is_leaf:
            self._seen.add(id(item))
            self._gradients.append((item, item.grad))
        if isinstance(item, _ATOMS):
            return
        self._seen.add(id(item))
        self._kept.append(item)
        if isinstance(item, dict):
            self._dicts.append((item, copied_container(item)))
            self._pending += item.values()
        elif isinstance(item, list | deque):
            self._lists.append((item, list(item)))
            self._pending += item
        elif isinstance(item, tuple):
            self._pending += item
        elif isinstance(item, set):
            self._sets.append((item, set(item)))
            self._pending += item
        elif isinstance(item, FunctionType):
            self._look_at_function(item)
        elif isinstance(item, MethodType):
            self._pending += (item.__self__, item.__func__)
        elif isinstance(item, functools.partial):
            if not type(item).__module__.startswith("hocket"):
                self._partials.append((item, item.args))
                self._pending += (item.func, item.args, item.keywords)
        elif isinstance(item, _LRU):
            self._caches.append(item)
        elif isinstance(item, torch.Generator):
            self._generators.append((item, item.get_state()))
        else:
            self._look_at_object(item)

    def _look_at_function(self, function: FunctionType) -> None:
        self._pending += (function.__defaults__, function.__kwdefaults__, vars(function))
        for cell in function.__closure__ or ():
            content = _content(cell)
            self._cells.append((cell, content))
            self._pending.append(content)
        if not _is_closed(function.__module__):
            self._look_at_names(function.__globals__, _global_names(function.__code__))

    def _look_at_object(self, item: Any) -> None:
        is_module = isinstance(item, nn.Module)
        if is_module:
            for cls in type(item).__mro__:
                if not _is_closed(cls.__module__):
                    self._look_at_class(cls)
        elif type(item).__module__.startswith("hocket."):
            # Their other attributes are results of the run, which must last.
            self._pending += (getattr(item, name, None) for name in _HELD_FUNCTIONS)
            return
        elif _is_closed(type(item).__module__) and not isinstance(item, SimpleNamespace):
            return
        self._pending.append(getattr(item, "__dict__", None))
        for cls in () if is_module else type(item).__mro__:
            for name in _slot_names(cls):
                value = getattr(item, name, _MISSING)
                self._slots.append((item, name, value))
                self._pending.append(value)

    def _look_at_class(self, cls: type) -> None:
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        self._kept.append(cls)
        for name, value in vars(cls).items():
            if isinstance(value, staticmethod | classmethod):
                self._pending.append(value.__func__)
            elif isinstance(value, property):
                self._pending += (value.fget, value.fset)
            elif isinstance(value, FunctionType | _LRU):
                self._pending.append(value)
            elif not name.startswith("__"):
                self._note_named(cls, name, value)

    def _look_at_names(self, names_of: dict[str, Any], names: frozenset[str]) -> None:
        for name in names & names_of.keys():
            value = names_of[name]
            if isinstance(value, FunctionType | _LRU | nn.Module):
                self._pending.append(value)
            elif not isinstance(value, type | ModuleType):
                self._note_named(names_of, name, value)

    def _note_named(self, owner: Any, name: str, value: Any) -> None:
        self._named.append((owner, name, value))
        if isinstance(value, dict | list | set | deque) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._shared.append((value, copied_container(value)))

    # ── change ───────────────────────────────────────────────────────────────────────────────

    def swap(self, twins: Twins) -> None:
        """Put the twins in place of their originals, wherever these are held."""
        for tensor, _ in self._gradients:
            tensor.grad = None
        for found, saved in self._dicts:
            for key, value in saved.items():
                if (new := _replaced(value, twins)) is not value:
                    found[key] = new
        for items, before in self._lists:
            for at, value in enumerate(before):
                if (new := _replaced(value, twins)) is not value:
                    items[at] = new
        for cell, value in self._cells:
            if (new := _replaced(value, twins)) is not value:
                cell.cell_contents = new
        for part, args in self._partials:
            if (changed := _replaced(args, twins)) is not args:
                part.__setstate__((part.func, changed, part.keywords, vars(part)))
        for item, name, value in self._slots:
            if (new := _replaced(value, twins)) is not value:
                object.__setattr__(item, name, new)

    def restore(self) -> None:
        """Have everything be as it was."""
        for tensor, gradient in self._gradients:
            tensor.grad = gradient
        for found, saved in self._dicts:
            if not _are_same_items(found, saved):
                found.clear()
                found.update(saved)
        for items, before in self._lists:
            if not _are_same(items, before):
                items.clear()
                items.extend(before)
        for some, earlier in self._sets:
            if some != earlier:
                some.clear()
                some.update(earlier)
        for cell, value in self._cells:
            _put_back(cell, value)
        for part, args in self._partials:
            if part.args is not args:
                part.__setstate__((part.func, args, part.keywords, vars(part)))
        for item, name, value in self._slots:
            if getattr(item, name, _MISSING) is not value:
                if value is _MISSING:
                    object.__delattr__(item, name)
                else:
                    object.__setattr__(item, name, value)
        for generator, state in self._generators:
            generator.set_state(state)
        self._restore_names()

    # ── compare ──────────────────────────────────────────────────────────────────────────────

    def numbers(self) -> list[Any]:
        """Numbers, strings, flags and lengths that were found, in the order of the walk."""
        found: list[Any] = []
        for _, saved in self._dicts:
            found += (len(saved), *_numbers_in(saved.values()))
        for _, before in self._lists:
            found += (len(before), *_numbers_in(before))
        found += (len(saved) for _, saved in self._sets)
        found += _numbers_in(value for _, value in self._cells)
        found += _numbers_in(value for _, _, value in (*self._slots, *self._named))
        for _, shared in self._shared:
            found += (len(shared), *_numbers_in(_items(shared)))
        return found

    def is_changed(self) -> bool:
        """True if a container, attribute, cell or name holds another object than before."""
        return (
            any(not _are_same_items(found, saved) for found, saved in self._dicts)
            or any(not _are_same(items, before) for items, before in self._lists)
            or any(some != earlier for some, earlier in self._sets)
            or any(_content(cell) is not value for cell, value in self._cells)
            or any(getattr(i, name, _MISSING) is not value for i, name, value in self._slots)
            or any(_named_value(owner, name) is not value for owner, name, value in self._named)
            or any(not _are_same(_items(now), _items(saved)) for now, saved in self._shared)
        )

    def _restore_names(self) -> None:
        """Restore what outlives the model and may be others': only where tensors were left."""
        for owner, name, value in self._named:
            now = _named_value(owner, name)
            if now is not value and _holds(torch.Tensor, now):
                if isinstance(owner, dict):
                    owner[name] = value
                else:
                    setattr(owner, name, value)
        for container, saved in self._shared:
            if not _are_same(_items(container), _items(saved)) and _holds(torch.Tensor, container):
                container.clear()
                getattr(container, "extend" if hasattr(container, "extend") else "update")(saved)
        for cache in self._caches:
            if cache.cache_info().currsize and _holds(FakeTensor, gc.get_referents(cache)):
                cache.cache_clear()


_ATOMS = (
    torch.Tensor, torch.UntypedStorage, torch.Size, torch.dtype, torch.device, str, bytes, int,
    float, complex, type(None), type, ModuleType, np.ndarray, np.generic, torch.optim.Optimizer,
    torch.utils.data.DataLoader, torch.utils.data.Dataset, type(...),
)  # fmt: skip
"""Objects that are not looked into: they hold nothing of a model, or are not the model's."""


def _named_value(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, dict) else vars(owner).get(name)


def copied_container(container: Any) -> Any:
    """A shallow copy with the stored values.

    Subclasses of dict may return others by ``[]``, as transformers' ACT2FN does, which creates a
    module for each of its names.
    """
    if isinstance(container, dict):
        return {key: dict.__getitem__(container, key) for key in container}
    return container.copy()


def _items(container: Any) -> list[Any]:
    return list(container.values() if isinstance(container, dict) else container)


def _numbers_in(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if isinstance(value, int | float | str))


def _is_closed(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _CLOSED


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _MISSING


def _put_back(cell: CellType, value: Any) -> None:
    if _content(cell) is value:
        return
    if value is _MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def _slot_names(cls: type) -> tuple[str, ...]:
    names = vars(cls).get("__slots__", ())
    found = (names,) if isinstance(names, str) else tuple(names)
    return tuple(n for n in found if not n.startswith("__"))


@functools.cache
def _global_names(code: Any) -> frozenset[str]:
    """Names that a function or one inside it looks up."""
    inner = (each for each in code.co_consts if hasattr(each, "co_names"))
    return frozenset(code.co_names).union(*(_global_names(each) for each in inner))


def _replaced(value: Any, twins: Twins) -> Any:
    """A tensor's twin, or a tuple with the twins of its tensors; else the value itself."""
    if isinstance(value, torch.Tensor):
        return twins.get(id(value), value)
    if not isinstance(value, tuple) or isinstance(value, torch.Size):
        return value
    items = [_replaced(item, twins) for item in value]
    if _are_same(value, items):
        return value
    make: Callable[..., Any] = getattr(type(value), "_make", type(value))
    return make(items)


def _are_same(first: Any, second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _are_same_items(first: Mapping[Any, Any], second: Mapping[Any, Any]) -> bool:
    return _are_same(first, list(second)) and _are_same(first.values(), list(second.values()))


def _holds(kind: type, value: Any, depth: int = 0) -> bool:
    """True if a container or object has such a tensor in it."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, kind)
    if depth == _MAX_DEPTH or isinstance(value, type | ModuleType | nn.Module):
        return False
    if isinstance(value, list | tuple | set | deque):
        return any(_holds(kind, each, depth + 1) for each in value)
    inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
    return isinstance(inner, dict) and any(_holds(kind, v, depth + 1) for v in inner.values())
