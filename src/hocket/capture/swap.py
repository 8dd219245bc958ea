"""Run a model with replaced tensors, and restore everything afterwards.

Tensors of the user's model are replaced in place instead of in a deep copy, so that closures,
partials, bound methods and functions that use the model as a global also use the replacements. All
objects that are reachable from the model and from the user's functions are saved before the run and
restored afterwards, also if the run raises: parameters, buffers, attributes, contents of lists and
dicts, closure cells. Globals and class attributes that these functions name are restored if they
hold other tensors than before, and `functools` caches with fake tensors are cleared.
"""

from __future__ import annotations

import functools
import gc
import io
import random
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import (
    CellType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from hocket.capture.trouble import UntraceableError

_one_at_a_time = threading.RLock()
"""Lock during a swap, because a model can have only one set of tensors at a time."""
_LRU: type = type(functools.lru_cache(lambda: None))
_CLOSED = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
"""Packages whose objects are not searched, except modules and plain containers."""
_HELD_FUNCTIONS = ("forward", "loss", "given")
"""Attributes in which objects of this package hold user functions."""
_MAX_DEPTH = 4

Twins = Mapping[int, torch.Tensor]
"""Replacement tensors by the id of the original."""


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the random generators of Python and numpy afterwards."""
    python, numpy = global_draws()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def global_draws() -> tuple[Any, Any]:
    """Return the states of the random generators of Python and numpy."""
    return random.getstate(), np.random.get_state()


def same_draws(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """True if neither generator has advanced between two results of `global_draws`."""
    return bool(one[0] == other[0]) and repr(one[1][2:]) == repr(other[1][2:]) and (
        np.array_equal(one[1][1], other[1][1])
    )  # fmt: skip


@contextmanager
def swapped_tensors(model: nn.Module, twins: Twins, *functions: Any) -> Iterator[nn.Module]:
    """Yield the model with ``twins`` in place of its tensors; restore everything afterwards.

    ``functions`` are called with the model and may hold its tensors and modules themselves. The
    random generators of Python and numpy are restored as well; PyTorch's are not touched.
    """
    with _one_at_a_time, generators_kept():
        state = ReachableState((model, *functions))
        try:
            state.swap(twins)
            yield model
        finally:
            state.restore()


class PythonState:
    """Snapshot of the Python state of a model and of the functions given with it."""

    def __init__(self, *roots: Any) -> None:
        self._state = ReachableState(roots)
        self._draws = global_draws()
        self.numbers = self._state.numbers()
        """Numbers, strings, flags and container lengths, in traversal order."""

    def has_drawn(self) -> bool:
        """True if Python's or numpy's generator has advanced since the snapshot."""
        return not same_draws(self._draws, global_draws())

    def is_changed(self) -> bool:
        """True if any held object has been replaced since the snapshot."""
        return self._state.is_changed()


class Holder(NamedTuple):
    """A mutable object with its saved content.

    ``read`` and ``write`` bypass methods that the object's class overrides: a lookup may create the
    requested item (as transformers' ACT2FN does), and a write may be refused.
    """

    owner: Any
    saved: tuple[Any, ...]
    read: Callable[[Any], tuple[Any, ...]]
    write: Callable[[Any, tuple[Any, ...]], None]
    is_global: bool = False
    """True for class attributes and globals, which outlive the model and may belong to others."""

    def is_changed(self) -> bool:
        """True if the content has been replaced by other objects."""
        return not _are_same(self.read(self.owner), self.saved)

    def renewed(self) -> Holder:
        """Return the holder with its present content."""
        return self._replace(saved=self.read(self.owner))


class ReachableState:
    """Contents of every mutable object that is reachable from some roots."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._seen: set[int] = set()
        self.holders: list[Holder] = []
        self._caches: list[Any] = []
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self.generators: list[tuple[torch.Generator, torch.Tensor]] = []
        """Random number generators with their states."""
        self._iterators: dict[int, Any] = {}
        self._kept: list[Any] = []
        """References that keep the ids of visited objects from being reused."""
        self._pending: list[Any] = list(roots)
        while self._pending:
            self._look_at(self._pending.pop())

    # ── find ─────────────────────────────────────────────────────────────────────────────────

    def _look_at(self, item: Any) -> None:
        if id(item) in self._seen:
            return
        # The type is used, because `isinstance` reads `__class__`, which proxy objects compute.
        kind = type(item)
        if issubclass(kind, torch.Tensor) and item.requires_grad and item.is_leaf:
            self._seen.add(id(item))
            self._gradients.append((item, item.grad))
        if issubclass(kind, _ATOMS):
            return
        self._seen.add(id(item))
        self._kept.append(item)
        if issubclass(kind, tuple):
            self._pending += tuple.__iter__(item)
        elif issubclass(kind, _CONTAINERS):
            self._pending += self._hold_container(item)
        elif kind is FunctionType:
            self._look_at_function(item)
        elif kind is MethodType:
            self._pending += (item.__self__, item.__func__)
        elif issubclass(kind, functools.partial):
            if not kind.__module__.startswith("hocket"):
                self._hold(item, _partial_args, _set_partial_args)
                self._pending += (item.func, item.args, item.keywords)
        elif kind is _LRU:
            self._caches.append(item)
        elif issubclass(kind, torch.Generator):
            self.generators.append((item, item.get_state()))
        elif issubclass(kind, io.IOBase):
            # A file is an iterator, too, but may be the process's standard output.
            return
        elif hasattr(kind, "__next__") and _is_closed(kind.__module__):
            self._iterators[id(item)] = _UntracedIterator()
        else:
            self._look_at_object(item, kind)

    def _hold(
        self, owner: Any, read: Callable[[Any], tuple[Any, ...]],
        write: Callable[[Any, tuple[Any, ...]], None], *, is_global: bool = False,
    ) -> tuple[Any, ...]:  # fmt: skip
        holder = Holder(owner, read(owner), read, write, is_global)
        self.holders.append(holder)
        return holder.saved

    def _hold_container(self, container: Any, *, is_global: bool = False) -> tuple[Any, ...]:
        read = _dict_contents if issubclass(type(container), dict) else _contents
        return self._hold(container, read, _refill, is_global=is_global)

    def _look_at_function(self, function: FunctionType) -> None:
        self._pending += (function.__defaults__, function.__kwdefaults__, vars(function))
        for cell in function.__closure__ or ():
            self._pending += self._hold(cell, _cell_contents, _set_cell)
        if not _is_closed(function.__module__):
            self._look_at_names(function.__globals__, _global_names(function.__code__))

    def _look_at_object(self, item: Any, kind: type) -> None:
        is_module = issubclass(kind, nn.Module)
        if is_module:
            for cls in kind.__mro__:
                if not _is_closed(cls.__module__):
                    self._look_at_class(cls)
        elif kind.__module__.startswith("hocket."):
            # Other attributes of hocket's objects are results of the run and must not be restored.
            self._pending += (getattr(item, name, None) for name in _HELD_FUNCTIONS)
            return
        elif _is_closed(kind.__module__) and not issubclass(kind, SimpleNamespace):
            return
        with suppress(AttributeError):
            self._pending.append(object.__getattribute__(item, "__dict__"))
        for cls in () if is_module else kind.__mro__:
            for slot in vars(cls).values():
                if type(slot) is MemberDescriptorType:
                    self._pending += self._hold((item, slot), _slot_contents, _set_slot)

    def _look_at_class(self, cls: type) -> None:
        if id(cls) in self._seen:
            return
        self._seen.add(id(cls))
        self._kept.append(cls)
        for name, value in vars(cls).items():
            kind = type(value)
            if kind in (staticmethod, classmethod):
                self._pending.append(value.__func__)
            elif kind is property:
                self._pending += (value.fget, value.fset)
            elif kind in (FunctionType, _LRU):
                self._pending.append(value)
            elif not name.startswith("__"):
                self._hold_named(cls, name, value)

    def _look_at_names(self, names_of: dict[str, Any], names: frozenset[str]) -> None:
        for name in names & names_of.keys():
            value = names_of[name]
            if issubclass(type(value), (FunctionType, _LRU, nn.Module)):
                self._pending.append(value)
            elif not issubclass(type(value), (type, ModuleType)):
                self._hold_named(names_of, name, value)

    def _hold_named(self, owner: Any, name: str, value: Any) -> None:
        self._hold((owner, name), _named_contents, _set_named, is_global=True)
        if issubclass(type(value), _CONTAINERS) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._hold_container(value, is_global=True)

    # ── change ───────────────────────────────────────────────────────────────────────────────

    def swap(self, twins: Twins) -> None:
        """Replace tensors by their twins wherever they are held."""
        for tensor, _ in self._gradients:
            tensor.grad = None
        replacements = {**twins, **self._iterators}
        for holder in self.holders:
            if not holder.is_global:
                new = _replaced(holder.saved, replacements)
                if new is not holder.saved:
                    holder.write(holder.owner, new)

    def restore(self) -> None:
        """Restore all saved contents; globals only if tensors were left in them."""
        for tensor, gradient in self._gradients:
            tensor.grad = gradient
        for holder in self.holders:
            if holder.is_changed() and (
                not holder.is_global or _holds(torch.Tensor, holder.read(holder.owner))
            ):
                holder.write(holder.owner, holder.saved)
        for generator, state in self.generators:
            generator.set_state(state)
        for cache in self._caches:
            # A single entry of a cache cannot be removed, so caches with fake tensors are cleared.
            if cache.cache_info().currsize and _holds(FakeTensor, gc.get_referents(cache)):
                cache.cache_clear()

    # ── compare ──────────────────────────────────────────────────────────────────────────────

    def numbers(self) -> list[Any]:
        """Numbers, strings, flags and lengths, in traversal order."""
        found: list[Any] = []
        for holder in self.holders:
            found += (len(holder.saved), *_numbers_in(holder.saved))
        return found

    def is_changed(self) -> bool:
        """True if a container, attribute, closure cell or global holds a new object."""
        return any(holder.is_changed() for holder in self.holders)


_CONTAINERS = (dict, list, set, deque)
_ATOMS = (
    torch.Tensor, torch.UntypedStorage, torch.Size, torch.dtype, torch.device, str, bytes, int,
    float, complex, type(None), type, ModuleType, np.ndarray, np.generic, torch.optim.Optimizer,
    torch.utils.data.DataLoader, torch.utils.data.Dataset, type(...),
)  # fmt: skip
"""Types whose objects are not searched, because they cannot contain a model's tensors."""


class _UntracedIterator:
    """Replaces a user's iterator during tracing, because a consumed item cannot be put back."""

    def __iter__(self) -> _UntracedIterator:
        return self

    def __next__(self) -> Any:
        raise UntraceableError(
            "the model takes an item from an iterator, which a trace would use up",
            hint="take it in the training loop and pass it in the batch",
        )


def _base(container: Any) -> Any:
    """Built-in type of a container, whose methods bypass those of subclasses."""
    bases = (OrderedDict, *_CONTAINERS)
    return next(base for base in bases if issubclass(type(container), base))


def _contents(container: Any) -> tuple[Any, ...]:
    return tuple(_base(container).__iter__(container))


def _dict_contents(container: dict[Any, Any]) -> tuple[Any, ...]:
    return (*dict.keys(container), *dict.values(container))


def _refill(container: Any, contents: tuple[Any, ...]) -> None:
    base = _base(container)
    base.clear(container)
    if not issubclass(base, dict):
        (base.update if base is set else base.extend)(container, contents)
        return
    half = len(contents) // 2
    for key, value in zip(contents[:half], contents[half:], strict=True):
        base.__setitem__(container, key, value)


def _cell_contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _set_cell(cell: CellType, contents: tuple[Any, ...]) -> None:
    if contents:
        (cell.cell_contents,) = contents
    else:
        del cell.cell_contents


def _partial_args(part: Any) -> tuple[Any, ...]:
    args: tuple[Any, ...] = part.args
    return args


def _set_partial_args(part: Any, args: tuple[Any, ...]) -> None:
    part.__setstate__((part.func, args, part.keywords, vars(part)))


def _slot_contents(place: tuple[Any, Any]) -> tuple[Any, ...]:
    try:
        return (place[1].__get__(place[0]),)
    except AttributeError:
        return ()


def _set_slot(place: tuple[Any, Any], contents: tuple[Any, ...]) -> None:
    item, slot = place
    # Slots of types written in C may be read-only; their content is left unchanged.
    with suppress(AttributeError, TypeError):
        if contents:
            slot.__set__(item, *contents)
        else:
            slot.__delete__(item)


def _named_contents(place: tuple[Any, str]) -> tuple[Any, ...]:
    owner, name = place
    values = owner if isinstance(owner, dict) else vars(owner)
    return (values[name],) if name in values else ()


def _set_named(place: tuple[Any, str], contents: tuple[Any, ...]) -> None:
    owner, name = place
    if isinstance(owner, dict):
        owner[name] = contents[0]
    else:
        type.__setattr__(owner, name, contents[0])


def _numbers_in(values: Iterable[Any]) -> Iterator[Any]:
    return (value for value in values if issubclass(type(value), (int, float, str)))


def _is_closed(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _CLOSED


@functools.cache
def _global_names(code: Any) -> frozenset[str]:
    """Global names that a function or its inner functions look up."""
    inner = (each for each in code.co_consts if hasattr(each, "co_names"))
    return frozenset(code.co_names).union(*(_global_names(each) for each in inner))


def _replaced(value: Any, twins: Mapping[int, Any]) -> Any:
    """Replacement of an object, or of a tuple's items; otherwise the value itself."""
    if not issubclass(type(value), tuple) or isinstance(value, torch.Size):
        return twins.get(id(value), value)
    items = [_replaced(item, twins) for item in tuple.__iter__(value)]
    if _are_same(value, items):
        return value
    make: Callable[..., Any] = getattr(type(value), "_make", type(value))
    return make(items)


def _are_same(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _holds(kind: type, value: Any, depth: int = 0) -> bool:
    """True if a container or object holds a tensor of this type."""
    held_as = type(value)
    if issubclass(held_as, torch.Tensor):
        return issubclass(held_as, kind)
    if depth == _MAX_DEPTH or issubclass(held_as, (type, ModuleType, nn.Module)):
        return False
    inner: Any = ()
    if issubclass(held_as, tuple):
        inner = tuple.__iter__(value)
    elif issubclass(held_as, dict):
        inner = dict.values(value)
    elif issubclass(held_as, _CONTAINERS):
        inner = _contents(value)
    else:
        with suppress(AttributeError):
            inner = object.__getattribute__(value, "__dict__").values()
    return any(_holds(kind, each, depth + 1) for each in inner)
