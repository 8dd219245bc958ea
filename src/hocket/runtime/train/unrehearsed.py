"""What the first steps of a model hold that could not be rehearsed.

Such a model is trained as lean as it can be, and nobody knows before whether that keeps its budget.
So two steps are counted as they run, the second with all that the optimizer keeps, and where they
hold more than the budget a person is told how much.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hocket.base.units import format_apart, typed_bytes
from hocket.capture.fake import plain_batch
from hocket.runtime.memory.allocator import context_bytes
from hocket.runtime.memory.ledger import Ledger
from hocket.runtime.train.fitting import KeptBudget

_NUM_COUNTED = 2


class BudgetExceededWarning(UserWarning):
    """Steps of a model that could not be rehearsed hold more than their budget."""


class FirstSteps:
    """Counts the first steps of a training."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name, self._device = name, device
        self._num_left = _NUM_COUNTED
        self._peak_bytes = 0

    @contextmanager
    def counted(
        self, kept: KeptBudget, lasting: Callable[[], Iterable[torch.Tensor]], batch: Any
    ) -> Iterator[None]:
        """Around a step; ``lasting`` is what is on the device besides its batch."""
        if kept.peak_bytes is not None or not self._num_left:
            yield
            return
        there = [leaf for leaf in tree_leaves(plain_batch(batch)) if isinstance(leaf, torch.Tensor)]
        with self._counting([*lasting(), *there]):
            yield
        self._num_left -= 1
        if not self._num_left and self._peak_bytes > kept.section.budget_bytes[0]:
            held, allowed = format_apart(self._peak_bytes, kept.section.budget_bytes[0])
            warnings.warn(
                f"steps of {self._name} hold {held}, and the budget is {allowed}: it could not be "
                f'rehearsed, and is trained as lean as it can be; give it memory="'
                f'{typed_bytes(self._peak_bytes)}", or make the batch smaller',
                BudgetExceededWarning,
                6,
            )

    @contextmanager
    def _counting(self, lasting: Iterable[torch.Tensor]) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            yield
            peak_bytes = torch.cuda.max_memory_reserved(self._device) + context_bytes(self._device)
        else:
            ledger = Ledger()
            ledger.hold(lasting)
            with ledger:
                yield
            peak_bytes = ledger.peak_bytes
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
