"""Tensors that are never to be whole: something stands for them, and knows what is done to it.

What a stand-in has a rule for (turning it, rounding it, a product, a loss) is done to it as it is.
Whatever else wants its numbers gets the tensor itself, so that no model has to know of stand-ins.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch.utils._pytree import tree_map

_PLAIN = frozenset({torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__,
                    torch.Tensor.is_floating_point, torch.Tensor.__repr__})  # fmt: skip
"""What a stand-in says of itself, beside its attributes."""


class StandInTensor(torch.Tensor):
    """What stands for a tensor."""

    @abstractmethod
    def whole(self) -> torch.Tensor:
        """The tensor itself."""

    @classmethod
    @abstractmethod
    def ruled(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a rule makes of a call; `NotImplemented` without one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function by its rule, or with whole tensors."""
        kwargs = dict(kwargs or {})
        result = cls.ruled(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if getattr(func, "__name__", "") == "__get__" or func in _PLAIN:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        made = tree_map(lambda x: x.whole() if isinstance(x, StandInTensor) else x, (args, kwargs))
        return func(*made[0], **made[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} sees {cls.__name__}, which is made whole before any op")
