"""Detection of calls that draw random numbers.

PyTorch says of an op whether it may. Fused attention and recurrent layers do it where they drop
something, and the backward pass of attention draws nothing: it is given the numbers of the forward
pass. Calls that draw keep their order, so what is taken for one holds others up: two waves of a
model with attention would wait for each other almost from end to end. O(1) per call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

_SHARES = ("dropout_p", "dropout")
"""Arguments that say what share is dropped."""
_GIVEN = "philox_seed"
"""An argument with numbers that another call drew."""


class _Share(NamedTuple):
    """Position, name and default of the argument with the share that an op drops."""

    position: int
    name: str
    default: float


@cache
def _share_of(function: Any) -> _Share | None:
    for position, argument in enumerate(function._schema.arguments):
        if argument.name in _SHARES:
            return _Share(position, argument.name, float(argument.default_value or 0.0))
    return None


@cache
def may_draw(function: Any) -> bool:
    """True if an op draws random numbers, with some arguments at least."""
    is_given = any(argument.name == _GIVEN for argument in function._schema.arguments)
    return torch.Tag.nondeterministic_seeded in function.tags and not is_given


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a call of ``function`` draws random numbers."""
    if not may_draw(function):
        return False
    share = _share_of(function)
    if share is None:
        return True
    position, name, default = share
    share = args[position] if position < len(args) else kwargs.get(name, default)
    return bool(share)
