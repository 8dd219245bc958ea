"""Replay whole steps of a model within a budget as one CUDA graph, where the plan moves nothing.

Forward, backward with what is computed again, and the updates that follow each block's gradients
are captured as the model's own modules ask for them (`repeats`); afterwards the host asks once for
all of it. A graph keeps the memory that its step needs at most, beside parameters, states and a
copy of the batch: what else runs meanwhile, such as an evaluation, has no room left. So the graph
goes before that, and the next step is captured anew; where that happens all the time, steps are
called. O(parameters) comparisons per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.capture.fake import plain_batch
from hocket.runtime.strategy import StepOutput
from hocket.runtime.train.batches import on_device, signature_of
from hocket.runtime.train.captured import StaticBatch, cloned, model_key, on_stream
from hocket.runtime.train.cuda_graphs import Repeats, place_of, update_hindrance
from hocket.runtime.train.loss_weight import Weight

FEWEST_REPLAYS = 4
"""A graph that goes after fewer steps was not worth its capture."""
StepPasses = Callable[[Any, Weight], StepOutput]
"""Forward, backward and updates of a batch with a weight."""
Capture = Callable[[Callable[[], StepOutput]], Callable[[], StepOutput]]
"""What makes a call that repeats another one; its results are overwritten by the next."""


class CapturedBudgetStep(NamedTuple):
    """A step that can be launched, with what it reads."""

    launch: Callable[[], StepOutput]
    batch: StaticBatch
    scale: torch.Tensor


class ReplayedBudget:
    """Steps of one model on one device: called, and replayed once they repeat."""

    def __init__(
        self, model: nn.Module, device: torch.device, refusal: str, capture: Capture | None = None
    ) -> None:
        """``refusal`` says why steps are never replayed; empty where they are."""
        self._model, self._device = model, device
        self._stream = None if refusal or device.type != "cuda" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._capture = capture or self._as_graph
        self.repeats: Repeats[CapturedBudgetStep] = Repeats(refusal)
        self._num_replayed = 0
        self._was_elsewhere = True
        """Whether others than called steps had the device last."""

    def __call__(
        self,
        batch: Any,
        weight: Weight,
        optimizer: torch.optim.Optimizer | None,
        passes: StepPasses,
    ) -> StepOutput:
        """One step, which the optimizer updates; without one gradients stay, and it is called. So
        is one that adds to gradients of others: a graph would add to theirs each time."""
        batch = plain_batch(batch)
        if self.repeats.refusal:
            return passes(batch, weight)
        is_pending = any(parameter.grad is not None for parameter in self._model.parameters())
        if optimizer is None or is_pending or update_hindrance(optimizer, is_made_fused=True):
            self.let_go()
            return self._beside(lambda: passes(batch, weight))
        key = tuple(self._origin(batch, optimizer))
        found = self.repeats.find(key, lambda: self._captured(batch, passes))
        if found is None:
            return self._beside(lambda: passes(batch, weight))
        found.batch.refill(batch)
        found.scale.fill_(weight)
        carried = found.launch()
        self._num_replayed += 1
        return StepOutput(carried.loss.clone(), cloned(carried.outputs))

    def let_go(self) -> None:
        """Give back the memory of a graph, because others need room."""
        self._was_elsewhere = True
        if self.repeats.captured is None:
            return
        self.repeats.captured = None
        if self._num_replayed < FEWEST_REPLAYS:
            self.repeats.refusal = "evaluations or other steps come between nearly all steps"
        self._num_replayed = 0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _origin(self, batch: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        """All that makes a step the same as another, up to the numbers of its batch."""
        yield signature_of(batch)
        yield model_key(self._model, self._device)
        for group in optimizer.param_groups:
            yield [place_of(value) for key, value in group.items() if key != "params"]
            for parameter in group["params"]:
                yield [place_of(s) for s in optimizer.state.get(parameter, {}).values()]

    def _captured(self, batch: Any, passes: StepPasses) -> CapturedBudgetStep:
        static = StaticBatch(on_device(batch, self._device))
        scale = torch.ones((), device=self._device)
        self._num_replayed = 0
        try:
            launch = self._capture(lambda: passes(static.batch, scale))
            return CapturedBudgetStep(launch, static, scale)
        finally:
            # What a capture that failed has left.
            for parameter in self._model.parameters():
                parameter.grad = None

    def _as_graph(self, run: Callable[[], StepOutput]) -> Callable[[], StepOutput]:
        """A CUDA graph of what a function asks for."""
        graph = torch.cuda.CUDAGraph()
        # Workspaces of the steps before would be there twice.
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                carried = run()
        finally:
            torch._C._cuda_clearCublasWorkspaces()

        def launch() -> StepOutput:
            graph.replay()
            return carried

        return launch

    def _beside(self, run: Callable[[], StepOutput]) -> StepOutput:
        """On the stream that is captured later: what autograd and libraries keep for a stream."""
        if self._stream is None:
            return run()
        if self._was_elsewhere:
            # Workspaces are a stream's own: those of the usual one would be there besides.
            torch._C._cuda_clearCublasWorkspaces()
            self._was_elsewhere = False
        with on_stream(self._stream, self._device):
            carried = run()
        # In memory of the stream that they are looked at on.
        return StepOutput(carried.loss.clone(), cloned(carried.outputs))
