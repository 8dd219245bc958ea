"""Replaces ``forward`` of a model's modules while a strategy trains the model.

A registry records which strategy has patched each model. A strategy whose model was patched by a
later one is refused, and `released_model` lets one strategy replace another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from hocket.base.errors import UsageError


class ReleasesModel(Protocol):
    """A strategy that patches a model and can release it."""

    def leave(self) -> None:
        """Restore the modules' own forwards."""

    def come_back(self) -> None:
        """Patch the model again after `leave`."""


_strategies: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ReleasesModel]]
_strategies = weakref.WeakKeyDictionary()
"""The strategy that has patched each model."""


class PatchedForward(partial[Any]):
    """Function that replaces a module's own forward."""

    strategy: ReleasesModel
    module: nn.Module
    own: Any
    """Forward set on the module itself instead of its class; None for most modules."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy or pickle as the module's own forward, without references to hocket."""
        # The copy of the module exists by now, without attributes: its class's forward is found.
        return (getattr, (self.module, "forward")) if self.own is None else (_as_it_is, (self.own,))


def _as_it_is(own: Any) -> Any:
    return own


def claim_model(model: nn.Module, strategy: ReleasesModel | None) -> None:
    """Record the strategy that has patched a model; None removes the record."""
    if strategy is None:
        _strategies.pop(model, None)
    else:
        _strategies[model] = weakref.ref(strategy)


def require_unclaimed(model: nn.Module, strategy: object) -> None:
    """Refuse to train a model that another strategy trains and may be updating."""
    other = _strategies.get(model)
    if other is not None and other() is not strategy:
        raise retrained_error()


def retrained_error() -> UsageError:
    """Return the error for a step of a model that was passed to `hocket.prepare` again."""
    return UsageError(
        "this model was given to a later hocket.prepare", hint="train with what it returned"
    )


def patch_forward(module: nn.Module, strategy: ReleasesModel, function: Callable[..., Any]) -> None:
    """Replace the forward of a module by ``function``."""
    patched = PatchedForward(function)
    patched.strategy, patched.module = strategy, module
    patched.own = vars(module).get("forward")
    module.forward = patched


def eager_only(own: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that calls ``own`` for fake tensors, and ``call`` otherwise.

    Tracing needs the ops of the module's own forward, with fake parameters in place of fetched
    ones.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_traced = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        return (own if is_traced else call)(*args, **kwargs)

    return forward


def restore_forwards(modules: Iterable[nn.Module]) -> None:
    """Restore the modules' own forwards."""
    for module in modules:
        patched = vars(module).get("forward")
        if not isinstance(patched, PatchedForward):
            continue
        del module.forward
        if patched.own is not None:
            module.forward = patched.own


@contextmanager
def released_model(model: nn.Module) -> Iterator[None]:
    """Release a model from its current strategy; if the body fails, the strategy takes it back."""
    found = [vars(module).get("forward") for module in model.modules()]
    strategies = {id(f.strategy): f.strategy for f in found if isinstance(f, PatchedForward)}
    for strategy in strategies.values():
        strategy.leave()
    try:
        yield
    except BaseException:
        for strategy in strategies.values():
            strategy.come_back()
        raise
