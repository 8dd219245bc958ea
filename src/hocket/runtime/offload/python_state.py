"""Python state of recomputed modules: attributes, containers, closures and generators.

The second run of a module starts with the values that the first run started with: counters, and
random number generators including those of Python and NumPy. Afterwards all values are as the first
run left them. Without that, a module that counts its calls would silently train on other numbers.
All values are compared around the very first run, later only those that changed in it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import CellType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hocket.capture.swap import copied_container

_SCALARS = (bool, int, float, str, type(None))
_CONTAINERS = (list, dict, set, deque)
_OWN_FIELDS = frozenset(vars(nn.Module()))


class _Drawn(NamedTuple):
    """A random number generator and its state."""

    generator: torch.Generator
    state: torch.Tensor


class _Attribute:
    """Module attribute that is a number, string, None or random number generator."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._fields, self._name = vars(module), name

    def read(self) -> Any:
        value = self._fields.get(self._name)
        return _Drawn(value, value.get_state()) if isinstance(value, torch.Generator) else value

    def write(self, value: Any) -> None:
        if isinstance(value, _Drawn):
            value.generator.set_state(value.state)
            value = value.generator
        self._fields[self._name] = value

    def is_same(self, before: Any, now: Any) -> bool:
        if isinstance(before, _Drawn) and isinstance(now, _Drawn):
            return before.generator is now.generator and torch.equal(before.state, now.state)
        # None that becomes a tensor is a cache, which stays.
        is_state = isinstance(now, _Drawn) or type(now) in _SCALARS
        return not is_state or _are_same(before, now)


class _Contents:
    """Contents of a container, or of a closure's cell."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def read(self) -> Any:
        holder = self._holder
        return holder.cell_contents if isinstance(holder, CellType) else copied_container(holder)

    def write(self, value: Any) -> None:
        if isinstance(self._holder, CellType):
            self._holder.cell_contents = value
            return
        self._holder.clear()
        (self._holder.extend if hasattr(self._holder, "extend") else self._holder.update)(value)

    def is_same(self, one: Any, other: Any) -> bool:
        if not isinstance(one, _CONTAINERS):
            return _are_same(one, other)
        ours, theirs = list(one), list(other)
        if isinstance(one, dict):
            ours, theirs = [*ours, *one.values()], [*theirs, *other.values()]
        return len(ours) == len(theirs) and all(map(_are_same, ours, theirs))


class _GlobalGenerators:
    """States of the generators of Python and NumPy."""

    def read(self) -> Any:
        return random.getstate(), np.random.get_state(legacy=False)

    def write(self, value: Any) -> None:
        random.setstate(value[0])
        np.random.set_state(value[1])

    def is_same(self, one: Any, other: Any) -> bool:
        return bool(one[0] == other[0]) and bool(_comparable(one[1]) == _comparable(other[1]))


Place = _Attribute | _Contents | _GlobalGenerators
PythonValues = Mapping[Place, Any]


class PythonState:
    """State of some modules that is not held in tensors."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._moved: list[Place] | None = None
        """Places that the first run changed; None before the first run."""

    def before(self) -> PythonValues:
        """Return the values that a run may change, before the run."""
        places = list(self._places()) if self._moved is None else self._moved
        return {place: place.read() for place in places}

    def moved(self, before: PythonValues) -> PythonValues:
        """Return the values before the run of all places that the very first run changed."""
        if self._moved is None:
            self._moved = [p for p, value in before.items() if not p.is_same(value, p.read())]
        return {place: before[place] for place in self._moved if place in before}

    @contextmanager
    def reset_to(self, values: PythonValues) -> Iterator[None]:
        """Reset values to those before the first run; restore the current ones afterwards."""
        now = {place: place.read() for place in values}
        for place, value in values.items():
            place.write(value)
        try:
            yield
        finally:
            for place, value in now.items():
                place.write(value)

    def _places(self) -> Iterator[Place]:
        yield _GlobalGenerators()
        for module in self._modules:
            for name, value in vars(module).items():
                if type(value) in _SCALARS or isinstance(value, torch.Generator):
                    yield _Attribute(module, name)
                elif name not in _OWN_FIELDS:
                    yield from _contents_of(value)


def _contents_of(value: Any) -> Iterator[_Contents]:
    """Yield parts of an attribute that can change in place: a container, or cells of a function."""
    if isinstance(value, _CONTAINERS):
        yield _Contents(value)
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # a cell may be empty
            content = cell.cell_contents
            yield _Contents(content if isinstance(content, _CONTAINERS) else cell)


def _are_same(one: Any, other: Any) -> bool:
    """True if two values are one object, or equal scalars."""
    return one is other or (type(one) in _SCALARS and type(one) is type(other) and one == other)


def _comparable(state: Mapping[str, Any]) -> Any:
    inner = state["state"].items()
    found = {key: v.tobytes() if isinstance(v, np.ndarray) else v for key, v in inner}
    return found, state.get("has_gauss")
