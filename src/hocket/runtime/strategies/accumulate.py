"""Gradient accumulation: run a batch as microbatches, one after the other or in two waves.

The loss of each microbatch is weighted by its number of samples, so the accumulated gradient is
that of the mean over the batch, while only the activations of one microbatch are held at a time.
Batch norms see one microbatch at a time, as in any PyTorch loop that accumulates gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hocket.capture.perform import draw_seed
from hocket.runtime.collectives.gradient_reducer import GradientReducer
from hocket.runtime.strategies.batch_split import Count, microbatches, num_rows
from hocket.runtime.strategies.waves import WaveRunner
from hocket.runtime.strategy import (
    Passes,
    ReportsProgress,
    ReportsReplay,
    StepOutput,
    Strategy,
    Timings,
    feed,
)
from hocket.runtime.trace_options import Weight


@contextmanager
def seeded_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Use generators seeded with ``seed`` inside the context, and restore their state
    afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


class Accumulated(Passes):
    """A strategy that runs each batch as several microbatches."""

    def __init__(
        self,
        inner: Passes,
        sizes: Sequence[int],
        *,
        count: Count | None,
        device: torch.device,
        seed: int | None = None,
        predicted_s: float | None = None,
        waves: WaveRunner | None = None,
    ) -> None:
        """``sizes`` are proportions; without a seed draws continue from the generator's state.

        ``waves`` take the microbatches in two waves instead.
        """
        self.inner, self._sizes, self._count = inner, tuple(sizes), count
        self._waves = waves
        self._device, self._seed = device, seed
        self._reducer: GradientReducer | None = None
        self._on_move: Callable[[float], None] | None = None
        self.predicted_s, self.lost = predicted_s, inner.lost
        self.tensors: Mapping[str, torch.Tensor] = inner.tensors

    @property
    def replays(self) -> str:
        """Describe how microbatches are launched; see `ReportsReplay`."""
        source = self.inner if self._waves is None else self._waves
        return source.replays if isinstance(source, ReportsReplay) else ""

    def feed(self, reducer: GradientReducer) -> None:
        """Reduce gradients during the last microbatch; see `FeedsReducer`."""
        self._reducer = reducer
        feed(self.inner, reducer)

    def report_progress(self, tell: Callable[[float], None]) -> None:
        """Call ``tell`` with the fraction of a batch that is done; see `ReportsProgress`."""
        self._on_move = tell

    def _report(self, index: int, count: int) -> None:
        """Map the progress of the next microbatch to a fraction of the batch."""
        tell = self._on_move
        if tell is not None and isinstance(self.inner, ReportsProgress):
            self.inner.report_progress(lambda part: tell((index + part) / count))

    def _syncing(self, is_last: bool) -> AbstractContextManager[None]:
        if self._reducer is None or is_last:
            return nullcontext()
        return self._reducer.no_sync()

    def expect(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Let updates wait for all microbatches, unless each wave has its own."""
        if self._waves is not None:
            self._waves.expect(optimizer)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless each wave has done so."""
        if self._waves is None or not self._waves.has_updated:
            self.inner.update(optimizer)

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run forward and backward of one microbatch after the other, or in two waves."""
        batches, loss_parts = microbatches(batch, self._sizes, self._count)
        weights = [weight * share for share in loss_parts]
        parts: list[StepOutput] = []
        with self._draws(step):
            if self._waves is not None:
                with self._syncing(is_last=False):
                    parts = self._waves.train(batches, step, weights)
            else:
                for index, (each, part) in enumerate(zip(batches, weights, strict=True), 1):
                    self._report(index - 1, len(batches))
                    with self._syncing(is_last=index == len(batches)):
                        parts.append(self.inner.train(each, step, part))
        return _whole(parts, loss_parts, [num_rows(each) for each in batches])

    def timed(self, batch: Any, step: int, weight: Weight) -> tuple[StepOutput, Timings | None]:
        """Train like `train`, and also return op timings of the last microbatch."""
        batches, loss_parts = microbatches(batch, self._sizes, self._count)
        timings: Timings | None = None
        parts: list[StepOutput] = []
        with self._draws(step):
            for each, share in zip(batches, loss_parts, strict=True):
                with self._syncing(is_last=len(parts) + 1 == len(batches)):
                    found, timings = self.inner.timed(each, step, weight * share)
                parts.append(found)
        return _whole(parts, loss_parts, [num_rows(each) for each in batches]), timings

    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss of the batch in one forward pass: without gradients it needs little
        memory."""
        return self.inner.evaluate(batch)

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs for all samples."""
        return self.inner.predict(batch)

    def _draws(self, step: int) -> AbstractContextManager[None]:
        if self._seed is None:
            return nullcontext()
        return seeded_rng(draw_seed(self._seed, step, 0), self._device)


class AccumulatedAlone(Accumulated, Strategy):
    """Gradient accumulation in one process that holds the full model."""

    def __init__(self, inner: Strategy, sizes: Sequence[int], **options: Any) -> None:
        super().__init__(inner, sizes, **options)
        self._whole = inner

    def clip(self, max_norm: float) -> None:
        """Clip by the norm of all gradients."""
        self._whole.clip(max_norm)

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Gather weights and states."""
        self._whole.gather(optimizer)

    def wave_state(self) -> dict[str, Any]:
        """Return state of the waves that outlasts a step; see `HasWaveState`."""
        return {} if self._waves is None else self._waves.state()

    def load_wave_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        if self._waves is not None:
            self._waves.load_state(state)


def _whole(
    parts: Sequence[StepOutput], loss_parts: Sequence[float], rows: Sequence[int]
) -> StepOutput:
    """Join the outputs of all microbatches.

    Losses and scalars become weighted means, tensors of samples are concatenated in order; any
    other value is taken from the last microbatch.
    """
    loss = torch.stack(
        [part.loss.detach() * s for part, s in zip(parts, loss_parts, strict=True)]
    ).sum(0)
    flat = [tree_flatten(part.outputs) for part in parts]
    forms = {str(form) for _, form in flat}
    if len(forms) > 1:
        return StepOutput(loss, parts[-1].outputs)
    leaves = [
        _joined(each, loss_parts, rows) for each in zip(*(each for each, _ in flat), strict=True)
    ]
    return StepOutput(loss, tree_unflatten(leaves, flat[-1][1]))


def _joined(parts: Sequence[Any], loss_parts: Sequence[float], rows: Sequence[int]) -> Any:
    if not all(isinstance(part, torch.Tensor) for part in parts):
        return parts[-1]
    if all(part.dim() and part.shape[0] == n for part, n in zip(parts, rows, strict=True)):
        return torch.cat(list(parts))
    if all(part.dim() == 0 and part.is_floating_point() for part in parts):
        return torch.stack([p * s for p, s in zip(parts, loss_parts, strict=True)]).sum(0)
    return parts[-1]
