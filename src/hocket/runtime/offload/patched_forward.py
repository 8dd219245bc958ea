"""Forwards of modules in place of their own, for as long as a strategy has the model."""

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


class LeavesModel(Protocol):
    """A strategy whose forwards stand in a model."""

    def leave(self) -> None:
        """Have the model be as it was, with its own forwards."""

    def come_back(self) -> None:
        """Carry the model again, as before it was left."""


_strategies: weakref.WeakKeyDictionary[nn.Module, weakref.ref[LeavesModel]]
_strategies = weakref.WeakKeyDictionary()
"""Whose forwards stand in each model."""


class OtherForward(partial[Any]):
    """A call that stands in the place of a module's own forward."""

    strategy: LeavesModel
    module: nn.Module
    own: Any
    """What the module itself, not its class, had as its forward; None for most."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copied or pickled model has its own forwards, and nothing of hocket."""
        # The copy of the module is there by now, without attributes: its class's forward is found.
        return (getattr, (self.module, "forward")) if self.own is None else (_as_it_is, (self.own,))


def _as_it_is(own: Any) -> Any:
    return own


def carry(model: nn.Module, strategy: LeavesModel | None) -> None:
    """Note whose forwards stand in a model from here on; None where they are its own."""
    if strategy is None:
        _strategies.pop(model, None)
    else:
        _strategies[model] = weakref.ref(strategy)


def require_free(model: nn.Module, strategy: object) -> None:
    """Refuse to train a model that another one carries: its parameters may be under way."""
    other = _strategies.get(model)
    if other is not None and other() is not strategy:
        raise carried_later()


def carried_later() -> UsageError:
    """The error of a training whose model another one has taken."""
    return UsageError(
        "a later hocket.prepare carries this model", hint="train with what it returned"
    )


def put_forward(module: nn.Module, strategy: LeavesModel, function: Callable[..., Any]) -> None:
    """Have calls of a module go to ``function``."""
    other = OtherForward(function)
    other.strategy, other.module, other.own = strategy, module, vars(module).get("forward")
    module.forward = other


def unless_traced(own: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """A call in place of a module's own forward, but for fake tensors: who captures a model in
    training wants its own ops, and its parameters are not ours then."""

    def called(*args: Any, **kwargs: Any) -> Any:
        is_traced = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        return (own if is_traced else call)(*args, **kwargs)

    return called


def take_away(modules: Iterable[nn.Module]) -> None:
    """Have modules call their own forwards again."""
    for module in modules:
        other = vars(module).get("forward")
        if not isinstance(other, OtherForward):
            continue
        del module.forward
        if other.own is not None:
            module.forward = other.own


@contextmanager
def taken_over(model: nn.Module) -> Iterator[None]:
    """Have whatever carries a model leave it: of two that visit a module one would do nothing.

    Where what is done here fails, it comes back.
    """
    found = [vars(module).get("forward") for module in model.modules()]
    strategies = {id(f.strategy): f.strategy for f in found if isinstance(f, OtherForward)}
    for strategy in strategies.values():
        strategy.leave()
    try:
        yield
    except BaseException:
        for strategy in strategies.values():
            strategy.come_back()
        raise
