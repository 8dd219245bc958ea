"""Modules that are computed again for their backward pass, as if it had been once.

PyTorch's checkpoints run a function twice; what the modules write to their buffers, such as running
means, is written once here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

Function = Callable[..., Any]


def computed_again(
    modules: Collection[nn.Module],
    function: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    repeats_draws: bool = True,
) -> Any:
    """What a function of the modules gives; what it saves is made again in its backward pass."""
    again = _Repeated(modules)
    # A checkpoint saves each argument by itself and calls with other tensors the second time. What
    # was one tensor must be one again: attention takes another way where query, key and value are.
    distinct = list({id(value): value for value in args}.values())
    place_of = {id(value): place for place, value in enumerate(distinct)}
    places = [place_of[id(value)] for value in args]
    named = {name: place_of[id(value)] for name, value in kwargs.items() if id(value) in place_of}
    others = {name: value for name, value in kwargs.items() if name not in named}

    def called(*given: Any, **rest: Any) -> Any:
        by_name = {name: given[place] for name, place in named.items()}
        return function(*(given[place] for place in places), **by_name, **rest)

    return checkpoint(
        again.first(called), *distinct, use_reentrant=False, **others,
        preserve_rng_state=repeats_draws, context_fn=again.contexts,
    )  # fmt: skip


class _Repeated:
    """Has modules computed again without their buffers noticing: running means move once a step."""

    def __init__(self, modules: Collection[nn.Module]) -> None:
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        # Kernels of norms write to their running means unseen by autograd.
        self._moved: list[torch.Tensor] = [
            buffer
            for outer in modules
            for module in outer.modules()
            if isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False)
        ]
        self._is_first = True

    def first(self, forward: Function) -> Function:
        """The function; its first call shows which buffers it writes to."""

        def called(*args: Any, **kwargs: Any) -> Any:
            before = [buffer._version for buffer in self._buffers]
            result = forward(*args, **kwargs)
            if self._is_first:
                known = {id(buffer) for buffer in self._moved}
                self._moved += [
                    buffer for buffer, version in zip(self._buffers, before, strict=True)
                    if buffer._version != version and id(buffer) not in known
                ]  # fmt: skip
                self._is_first = False
            return result

        return called

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around the first call, and around the second."""
        return nullcontext(), self._unmoved()

    @contextmanager
    def _unmoved(self) -> Iterator[None]:
        kept = [buffer.clone() for buffer in self._moved]
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in zip(self._moved, kept, strict=True):
                    buffer.copy_(value)
