"""Numbers and generators that modules have as plain attributes, where modules are computed twice.

A counter that the first call has moved is for the second call what it was for the first, and so is
a generator that it drew from, also those of Python and of NumPy; afterwards all are as the first
call left them. All are looked at around the very first call, and around later ones those that moved
in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

_KINDS = (bool, int, float, str, type(None))
Place = tuple[nn.Module | None, str]
"""An attribute of a module, or a generator of the process."""
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
            self._moved = [place for place in now if not _is_same(now[place], before[place])]
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


def _is_number(value: Any) -> bool:
    return type(value) in _KINDS or isinstance(value, torch.Generator)


def _is_still_number(place: Place) -> bool:
    module, name = place
    return module is None or _is_number(vars(module).get(name))


def _noted(place: Place) -> Any:
    module, name = place
    if module is None:
        return random.getstate() if place == _PYTHON else np.random.get_state(legacy=False)
    value = vars(module).get(name)
    return _Drawing(value, value.get_state()) if isinstance(value, torch.Generator) else value


def _put(place: Place, value: Any) -> None:
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


def _position(state: Mapping[str, Any]) -> Any:
    """Where NumPy's generator stands, as what can be compared."""
    inner = state["state"].items()
    found = {key: v.tobytes() if isinstance(v, np.ndarray) else v for key, v in inner}
    return found, state.get("has_gauss")
