"""Forwards of modules in place of their own, for as long as a carrier has the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn, Protocol

from torch import nn

from hocket.base.errors import UsageError


class LeavesModel(Protocol):
    """A carrier whose forwards stand in a model."""

    def leave(self) -> None:
        """Have the model be as it was, with its own forwards."""

    def come_back(self) -> None:
        """Carry the model again, as before it was left."""


class OtherForward(partial[Any]):
    """A call that stands in the place of a module's own forward."""

    carrier: LeavesModel
    own: Any
    """What the module itself, not its class, had as its forward; None for most."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """A copy of the model would have its carrier with it, and the threads of that."""
        raise UsageError(
            "a model that hocket.prepare carries cannot be copied",
            hint="copy it before, or load train.state_dict()['model'] into another one",
        )


def put_forward(module: nn.Module, carrier: LeavesModel, function: Callable[..., Any]) -> None:
    """Have calls of a module go to ``function``."""
    other = OtherForward(function)
    other.carrier, other.own = carrier, vars(module).get("forward")
    module.forward = other


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
    carriers = {id(f.carrier): f.carrier for f in found if isinstance(f, OtherForward)}
    for carrier in carriers.values():
        carrier.leave()
    try:
        yield
    except BaseException:
        for carrier in carriers.values():
            carrier.come_back()
        raise
