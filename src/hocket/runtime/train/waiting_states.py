"""State dicts that wait for asynchronous updates, which run on after a step has returned.

``model.state_dict()`` and ``optimizer.state_dict()``, and what is loaded into them, wait for these
as ``train.state_dict()`` does; so does a copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hocket.base.errors import UsageError


class _WaitingHook:
    """A hook that waits."""

    # Hooks are wrapped with all that they have: a copy of the model would have its strategy.
    __slots__ = ("_wait",)

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def __call__(self, *_: object) -> None:
        """Whatever is saved or loaded."""
        self._wait()

    def __deepcopy__(self, memo: object) -> _WaitingHook:
        """The copy of a model has nothing to wait for. Modules are copied after hooks."""
        self._wait()
        return _WaitingHook(_nothing)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """A file of the whole model would need hocket to be read."""
        raise UsageError(
            "a model with async_update=True cannot be pickled as a whole",
            hint="save model.state_dict(), or copy.deepcopy(model); or leave async_update out",
        )


def _nothing() -> None:
    """There is nothing to wait for."""


class WaitingStates:
    """Where it is waited, for as long as a strategy has the model."""

    def __init__(self, wait: Callable[[], None], *, is_idle: bool) -> None:
        self._is_idle = is_idle
        self._hook = _WaitingHook(wait)
        self._handles: dict[object, list[RemovableHandle]] = {}

    def of(self, owner: nn.Module | torch.optim.Optimizer) -> None:
        """State dicts of it wait from here on."""
        if owner not in self._handles and not self._is_idle:
            self._handles[owner] = [
                owner.register_state_dict_pre_hook(self._hook),
                owner.register_load_state_dict_pre_hook(self._hook),
            ]

    def leave(self) -> None:
        """They wait no more."""
        for handles in self._handles.values():
            for handle in handles:
                handle.remove()
        self._handles.clear()
