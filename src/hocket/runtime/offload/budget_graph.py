"""CUDA graphs of entire training steps within a memory budget, for plans without host copies.

Forward, backward with recompute, and the update of each block are captured once; afterwards one
launch replays the step. A graph holds the peak memory of its step in addition to parameters,
optimizer state and a static copy of the batch, which leaves no memory for an evaluation between
steps. The graph is therefore released before an evaluation, and captured again in the next training
step. If a graph is released after fewer than `MIN_REPLAYS` replays, later steps stay eager. Each
step makes O(parameters) comparisons to see whether the captured step still applies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.capture.fake import plain_batch
from hocket.runtime.batches import on_device, signature_of
from hocket.runtime.replay import (
    GraphReplay,
    StaticBatch,
    address_of,
    cloned,
    eager_update_reason,
    model_key,
    on_stream,
)
from hocket.runtime.strategy import StepOutput
from hocket.runtime.trace_options import Weight

MIN_REPLAYS = 4
"""Replays that make a capture worthwhile; if a graph had fewer, later steps are eager."""
StepPasses = Callable[[Any, Weight], StepOutput]
"""Runs forward, backward and updates of a batch, with the weight of its loss."""
Capture = Callable[[Callable[[], StepOutput]], Callable[[], StepOutput]]
"""Captures a function and returns its replay, which overwrites the outputs of earlier replays."""


class CapturedBudgetStep(NamedTuple):
    """A captured step with its static inputs."""

    launch: Callable[[], StepOutput]
    batch: StaticBatch
    scale: torch.Tensor


class BudgetGraph:
    """Runs steps of one model on one device: the first eagerly, repeated ones by graph replay."""

    def __init__(
        self, model: nn.Module, device: torch.device, refusal: str, capture: Capture | None = None
    ) -> None:
        """``refusal`` is the reason why steps are never replayed, or an empty string."""
        self._model, self._device = model, device
        self._stream = None if refusal or device.type != "cuda" else torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._capture = capture or self._as_graph
        self.replay: GraphReplay[CapturedBudgetStep] = GraphReplay(refusal)
        self._num_replayed = 0
        self._was_elsewhere = True
        """True if anything but eager steps used the device last."""

    def __call__(
        self,
        batch: Any,
        weight: Weight,
        optimizer: torch.optim.Optimizer | None,
        passes: StepPasses,
    ) -> StepOutput:
        """Run one step with its updates, by graph replay if possible.

        The step is eager without an optimizer, with an optimizer that cannot be captured, and while
        gradients are accumulated: each replay would add to the same gradient tensors.
        """
        batch = plain_batch(batch)
        if self.replay.refusal:
            return passes(batch, weight)
        is_pending = any(parameter.grad is not None for parameter in self._model.parameters())
        if optimizer is None or is_pending or eager_update_reason(optimizer, is_made_fused=True):
            self.release()
            return self._eager(lambda: passes(batch, weight))
        key = tuple(self._key(batch, optimizer))
        found = self.replay.find(key, lambda: self._captured(batch, passes))
        if found is None:
            return self._eager(lambda: passes(batch, weight))
        # The graph reads its static batch and weight, not the tensors of this call.
        found.batch.refill(batch)
        found.scale.fill_(weight)
        output = found.launch()
        self._num_replayed += 1
        return StepOutput(output.loss.clone(), cloned(output.outputs))

    def release(self) -> None:
        """Release the memory of the captured graph."""
        self._was_elsewhere = True
        if self.replay.captured is None:
            return
        self.replay.captured = None
        if self._num_replayed < MIN_REPLAYS:
            self.replay.refusal = "evaluations or other steps come between nearly all steps"
        self._num_replayed = 0
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def _key(self, batch: Any, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
        """Yield shapes, addresses and settings that a captured graph depends on."""
        yield signature_of(batch)
        yield model_key(self._model, self._device)
        for group in optimizer.param_groups:
            # A replay reads tensors by address, so a loaded checkpoint needs a new graph.
            yield [address_of(value) for key, value in group.items() if key != "params"]
            for parameter in group["params"]:
                yield [address_of(s) for s in optimizer.state.get(parameter, {}).values()]

    def _captured(self, batch: Any, passes: StepPasses) -> CapturedBudgetStep:
        static = StaticBatch(on_device(batch, self._device))
        scale = torch.ones((), device=self._device)
        self._num_replayed = 0
        try:
            launch = self._capture(lambda: passes(static.batch, scale))
            return CapturedBudgetStep(launch, static, scale)
        finally:
            # A failed capture leaves gradients in the memory of its graph.
            for parameter in self._model.parameters():
                parameter.grad = None

    def _as_graph(self, run: Callable[[], StepOutput]) -> Callable[[], StepOutput]:
        """Capture a function as a CUDA graph; return a function that replays it."""
        graph = torch.cuda.CUDAGraph()
        # Otherwise workspaces of earlier steps would stay allocated beside those of the graph.
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()
        try:
            with torch.cuda.graph(graph, stream=self._stream):
                output = run()
        finally:
            torch._C._cuda_clearCublasWorkspaces()

        def launch() -> StepOutput:
            graph.replay()
            return output

        return launch

    def _eager(self, run: Callable[[], StepOutput]) -> StepOutput:
        """Run eagerly on the stream of the capture, because autograd and libraries keep state per
        stream."""
        if self._stream is None:
            return run()
        if self._was_elsewhere:
            # Workspaces belong to a stream: workspaces of the default stream would stay allocated.
            torch._C._cuda_clearCublasWorkspaces()
            self._was_elsewhere = False
        with on_stream(self._stream, self._device):
            output = run()
        # Copied into memory of the stream on which they are read.
        return StepOutput(output.loss.clone(), cloned(output.outputs))
