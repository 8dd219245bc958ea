"""Gradient accumulation: run a batch as microbatches, one after the other or in waves.

The loss of each microbatch is weighted by its number of samples, so the accumulated gradient is the
gradient of the mean loss over the batch. Only the activations of one microbatch are held at a time.
Batch norms normalize each microbatch separately, as in any PyTorch loop that accumulates gradients.
`join_outputs` combines the outputs of the microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hocket.capture.perform import draw_seed
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.strategies.batch_split import microbatches, num_rows
from hocket.runtime.strategies.parallel_task import ParallelTask
from hocket.runtime.strategies.waves import WaveRunner
from hocket.runtime.strategy import StepOutput, Strategy, Timings
from hocket.runtime.trace_options import Weight


@contextmanager
def seeded_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Use generators seeded with ``seed`` inside the context, and restore them afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Accumulated(Strategy):
    """A strategy that runs each batch as several microbatches."""

    def __init__(
        self,
        inner: Strategy,
        sizes: Sequence[int],
        task: ParallelTask,
        *,
        seed: int | None = None,
        waves: WaveRunner | None = None,
    ) -> None:
        """``sizes`` are the proportions of the microbatches.

        Without a ``seed``, random draws continue PyTorch's generator. ``waves``, if given, runs the
        microbatches instead of ``inner``.
        """
        self.inner, self._sizes, self._count = inner, tuple(sizes), task.count
        self._waves, self._device, self._seed = waves, task.device, seed
        self._reducer: GradientReducer | None = None
        self.predicted_s, self.lost = task.predicted_s, inner.lost
        self.tensors: Mapping[str, torch.Tensor] = inner.tensors

    @property
    def replays(self) -> str:
        """Description of how microbatches are launched."""
        return self.inner.replays if self._waves is None else self._waves.replays

    def feed(self, reducer: GradientReducer) -> None:
        """Reduce gradients during the last microbatch."""
        self._reducer = reducer
        if self._waves is not None:
            self._waves.reducer = reducer
        else:
            self.inner.feed(reducer)

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Defer updates until all microbatches have run, unless each wave is an update."""
        if self._waves is not None:
            self._waves.expect(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless each wave has done so."""
        if self._waves is None or not self._waves.has_updated:
            self.inner.update(optimizer)

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run forward and backward of all microbatches."""
        with self._draws(step):
            if self._waves is None:
                return self._in_turn(batch, weight, lambda part, w: self.inner.train(part, step, w))
            batches, shares = microbatches(batch, self._sizes, self._count)
            parts = self._waves.train(batches, step, [weight * share for share in shares])
            return join_outputs(parts, shares, [num_rows(each) for each in batches])

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """Train like `train`, without waves, and time the ops of the last microbatch."""
        found: list[Timings | None] = []

        def run(part: Any, weight: Weight) -> StepOutput:
            output, timings = self.inner.timed(part, step, weight)
            found.append(timings)
            return output

        with self._draws(step):
            return self._in_turn(batch, weight, run), found[-1]

    def _in_turn(
        self, batch: Any, weight: Weight, run: Callable[[Any, Weight], StepOutput]
    ) -> StepOutput:
        batches, shares = microbatches(batch, self._sizes, self._count)
        parts: list[StepOutput] = []
        for each, share in zip(batches, shares, strict=True):
            # Only the last microbatch completes the gradients that the reducer sums.
            is_last = len(parts) + 1 == len(batches)
            reducer = None if is_last else self._reducer
            with nullcontext() if reducer is None else reducer.no_sync():
                parts.append(run(each, weight * share))
        return join_outputs(parts, shares, [num_rows(each) for each in batches])

    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss of the batch, in one forward pass without microbatches."""
        return self.inner.evaluate(batch)

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs for all samples."""
        return self.inner.predict(batch)

    def clip(self, max_norm: float) -> None:
        """Clip by the norm of all gradients."""
        self.inner.clip(max_norm)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Finish pending updates."""
        self.inner.settle(optimizer)

    def _draws(self, step: int) -> AbstractContextManager[None]:
        if self._seed is None:
            return nullcontext()
        return seeded_rng(draw_seed(self._seed, step, 0), self._device)


def join_outputs(
    parts: Sequence[StepOutput], shares: Sequence[float], rows: Sequence[int]
) -> StepOutput:
    """Join the outputs of the parts of a batch.

    Losses and scalars become means weighted by ``shares``. Tensors with one row per sample are
    concatenated. Any other value is taken from the last part.
    """
    loss = _weighted_sum([part.loss.detach() for part in parts], shares)
    return StepOutput(loss, join_trees([part.outputs for part in parts], shares, rows))


def join_trees(trees: Sequence[Any], shares: Sequence[float], rows: Sequence[int]) -> Any:
    """Join nested outputs; see `join_outputs`."""
    flat = [tree_flatten(tree) for tree in trees]
    if len({str(form) for _, form in flat}) > 1:
        return trees[-1]
    leaves = [
        _joined(each, shares, rows) for each in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return tree_unflatten(leaves, flat[-1][1])


def _joined(parts: Sequence[Any], shares: Sequence[float], rows: Sequence[int]) -> Any:
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return parts[-1]
    if all(part.dim() and part.shape[0] == n for part, n in zip(parts, rows, strict=True)):
        return torch.cat(list(parts))
    if all(part.dim() == 0 and part.is_floating_point() for part in parts):
        return _weighted_sum(parts, shares)
    return parts[-1]


def _weighted_sum(parts: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    return torch.stack([part * share for part, share in zip(parts, shares, strict=True)]).sum(0)
