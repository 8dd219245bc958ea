"""Detect calls that draw random numbers.

PyTorch's op tags say only that an op may draw. Fused attention and recurrent layers draw if their
dropout is not zero; the backward pass of attention draws nothing, it receives the forward pass's
seed. Calls that draw keep their order, so a false positive delays other ops: two waves of a model
with attention would wait for each other almost throughout. O(1) per call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

_SHARES = ("dropout_p", "dropout")
"""Names of arguments that hold a dropout probability."""
_GIVEN = "philox_seed"
"""Name of an argument that holds random state drawn by another call."""


class _Share(NamedTuple):
    """Position, name and default of an op's dropout-probability argument."""

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
    """True if an op draws random numbers for at least some arguments."""
    is_given = any(argument.name == _GIVEN for argument in function._schema.arguments)
    return torch.Tag.nondeterministic_seeded in function.tags and not is_given


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if this call of ``function`` draws random numbers."""
    if not may_draw(function):
        return False
    share = _share_of(function)
    if share is None:
        return True
    position, name, default = share
    share = args[position] if position < len(args) else kwargs.get(name, default)
    return bool(share)
