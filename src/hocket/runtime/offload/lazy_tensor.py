"""Lazy tensors, which stand for tensors that are too large to exist as a whole.

Functions with a rule (a transpose, a cast, a product, a loss) are applied to the lazy tensor. Every
other function gets the real tensor, so that no model has to know of lazy ones.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch.utils._pytree import tree_map

_PLAIN = frozenset({torch.Tensor.dim, torch.Tensor.size, torch.Tensor.numel, torch.Tensor.__len__,
                    torch.Tensor.is_floating_point, torch.Tensor.__repr__})  # fmt: skip
"""Functions that a lazy tensor answers itself, beside its attributes."""


class LazyTensor(torch.Tensor):
    """A tensor subclass without data."""

    @abstractmethod
    def materialize(self) -> torch.Tensor:
        """Compute the real tensor."""

    @classmethod
    @abstractmethod
    def apply_rule(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply the rule of a function; `NotImplemented` without one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function by its rule, or with real tensors."""
        kwargs = dict(kwargs or {})
        result = cls.apply_rule(func, args, kwargs)
        if result is not NotImplemented:
            return result
        if getattr(func, "__name__", "") == "__get__" or func in _PLAIN:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        made = tree_map(
            lambda x: x.materialize() if isinstance(x, LazyTensor) else x, (args, kwargs)
        )
        return func(*made[0], **made[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} sees {cls.__name__}, which must be real before any op")
