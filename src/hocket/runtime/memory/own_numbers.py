"""Python state of modules that are computed twice: numbers, generators, lists, dicts, closures.

A counter that the first call has moved is for the second call what it was for the first, and so is
a generator that it drew from, also those of Python and of NumPy; afterwards all are as the first
call left them. All are looked at around the very first call, and around later ones those that moved
in it.
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

_KINDS = (bool, int, float, str, type(None))
_OWN_FIELDS = frozenset(vars(nn.Module()))


class Contents:
    """What a list, dict or set holds, or the cell of a closure."""

    def __init__(self, holder: Any) -> None:
        self._holder = holder

    def noted(self) -> Any:
        """The contents, as a copy that does not follow changes."""
        holder = self._holder
        is_cell = isinstance(holder, CellType)
        return holder.cell_contents if is_cell else copied_container(holder)

    def put(self, value: Any) -> None:
        """Have the holder hold these again."""
        if isinstance(self._holder, CellType):
            self._holder.cell_contents = value
            return
        self._holder.clear()
        (self._holder.extend if hasattr(self._holder, "extend") else self._holder.update)(value)


Place = tuple[nn.Module | None, str] | Contents
"""An attribute of a module, a generator of the process, or what a container holds."""
_PYTHON, _NUMPY = (None, "random"), (None, "numpy")
Numbers = Mapping[Place, Any]
"""What attributes are."""


class _Drawing(NamedTuple):
    """A generator of random numbers, and where it stands."""

    generator: torch.Generator
    state: torch.Tensor


class OwnNumbers:
    """The attributes of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._moved: list[Place] | None = None
        """None before the first call."""

    def before(self) -> Numbers:
        """What may move, before a call."""
        places = self._all() if self._moved is None else self._moved
        return {place: _noted(place) for place in places}

    def moved(self, before: Numbers) -> Numbers:
        """That of it which the call has moved."""
        if self._moved is None:
            now = {place: _noted(place) for place in before if _is_still_number(place)}
            self._moved = [
                place
                for place in now
                if not (_are_same_items if isinstance(place, Contents) else _is_same)(
                    now[place], before[place]
                )
            ]
        return {place: before[place] for place in self._moved if place in before}

    @contextmanager
    def held(self, moved: Numbers) -> Iterator[None]:
        """They are as before the first call, and afterwards as they are now."""
        now = {place: _noted(place) for place in moved}
        for place, value in moved.items():
            _put(place, value)
        try:
            yield
        finally:
            for place, value in now.items():
                _put(place, value)

    def _all(self) -> Iterator[Place]:
        yield from (_PYTHON, _NUMPY)
        for module in self._modules:
            for name, value in vars(module).items():
                if _is_number(value):
                    yield module, name
                elif name not in _OWN_FIELDS:
                    yield from _contents_of(value)


def _is_number(value: Any) -> bool:
    return type(value) in _KINDS or isinstance(value, torch.Generator)


def _contents_of(value: Any) -> Iterator[Contents]:
    """An attribute that can change without being replaced: a container, or a function's cells."""
    if isinstance(value, list | dict | set | deque):
        yield Contents(value)
    for cell in getattr(value, "__closure__", None) or ():
        with suppress(ValueError):  # a cell may be empty
            content = cell.cell_contents
            yield Contents(content if isinstance(content, list | dict | set | deque) else cell)


def _is_still_number(place: Place) -> bool:
    if isinstance(place, Contents):
        return True
    module, name = place
    return module is None or _is_number(vars(module).get(name))


def _noted(place: Place) -> Any:
    if isinstance(place, Contents):
        return place.noted()
    module, name = place
    if module is None:
        return random.getstate() if place == _PYTHON else np.random.get_state(legacy=False)
    value = vars(module).get(name)
    return _Drawing(value, value.get_state()) if isinstance(value, torch.Generator) else value


def _put(place: Place, value: Any) -> None:
    if isinstance(place, Contents):
        place.put(value)
        return
    module, name = place
    if module is None:
        (random.setstate if place == _PYTHON else np.random.set_state)(value)
        return
    if isinstance(value, _Drawing):
        value.generator.set_state(value.state)
        value = value.generator
    vars(module)[name] = value


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, _Drawing) and isinstance(other, _Drawing):
        return one.generator is other.generator and torch.equal(one.state, other.state)
    if isinstance(one, dict) and isinstance(other, dict):
        return bool(_position(one) == _position(other))
    return type(one) is type(other) and bool(one == other)


def _are_same_items(one: Any, other: Any) -> bool:
    """True if two contents are the same objects; equal numbers are the same."""
    if not isinstance(one, list | dict | set | deque):
        return _are_same_objects(one, other)
    ours, theirs = list(one), list(other)
    if isinstance(one, dict):
        ours, theirs = [*ours, *one.values()], [*theirs, *other.values()]
    return len(ours) == len(theirs) and all(map(_are_same_objects, ours, theirs))


def _are_same_objects(one: Any, other: Any) -> bool:
    return one is other or (type(one) in _KINDS and _is_same(one, other))


def _position(state: Mapping[str, Any]) -> Any:
    """Where NumPy's generator stands, as what can be compared."""
    inner = state["state"].items()
    found = {key: v.tobytes() if isinstance(v, np.ndarray) else v for key, v in inner}
    return found, state.get("has_gauss")
