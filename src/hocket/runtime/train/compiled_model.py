"""Steps with kernels of ``torch.compile``, replayed as CUDA graphs.

``torch.compile`` generates fewer and larger kernels; its own CUDA graphs hold one pass each and
leave the update to the host, which for small models takes longer than both passes. Here forward and
backward are one graph and the update another (`ReplayedUpdate`), so the host launches twice per
step. The first steps run without graphs on a side stream, so that kernels are compiled and chosen
before the capture. Steps that add to existing gradients run without graphs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.capture.step import apply_model
from hocket.runtime.strategy import StepOutput, Strategy
from hocket.runtime.train.batches import on_device, signature_of
from hocket.runtime.train.captured import StaticBatch, cloned, model_key, on_stream
from hocket.runtime.train.cuda_graphs import NOT_CUDA, GraphReplay, ReplayedUpdate, with_update
from hocket.runtime.train.eager_model import EagerModel, detached
from hocket.runtime.train.loss_weight import Weight
from hocket.runtime.train.trace_options import TraceOptions


class _CapturedPasses(NamedTuple):
    """A CUDA graph of forward and backward, with its inputs and results."""

    graph: torch.cuda.CUDAGraph
    batch: StaticBatch
    scale: torch.Tensor
    outcome: StepOutput
    gradients: list[torch.Tensor | None]


class CompiledModel(EagerModel, Strategy):
    """A model on one device whose steps run kernels of ``torch.compile``."""

    def __init__(
        self,
        model: nn.Module,
        recipe: TraceOptions,
        device: torch.device,
        *,
        backend: str,
        replay: bool,
    ) -> None:
        super().__init__(model.to(device), recipe)
        self._device = device
        self._run: Any = torch.compile(model, dynamic=False, backend=backend)
        self._is_replayed = replay and device.type == "cuda"
        self._aside = torch.cuda.Stream(device) if self._is_replayed else None  # type: ignore[no-untyped-call]
        self._update: Any = recipe.make_update
        if self._is_replayed and recipe.calls_optimizer:
            self._update = ReplayedUpdate()
        self.replay: GraphReplay[_CapturedPasses] = GraphReplay(
            "" if self._is_replayed else NOT_CUDA
        )

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """Parameters that require gradients at present."""
        return [each for each in self._model.parameters() if each.requires_grad]

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        self._update(optimizer)

    def clip(self, max_norm: float) -> None:
        """Clip the gradients by their global norm."""
        torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run forward and backward by compiled kernels."""
        batch = on_device(batch, self._device)
        is_pending = any(parameter.grad is not None for parameter in self._parameters)
        found = None
        if not (is_pending or self.replay.refusal):
            key = signature_of(batch), model_key(self._model, self._device)
            found = self.replay.find(key, lambda: self._capture(batch))
        if found is None:
            scale = torch.as_tensor(weight, dtype=torch.float32, device=self._device)
            with on_stream(self._aside, self._device):
                outcome, gradients = self._passes(batch, scale)
            self._add(gradients)
            return outcome
        graph, static, scale, outcome, gradients = found
        static.refill(batch)
        scale.fill_(weight)
        graph.replay()
        self._add(gradients)
        return StepOutput(outcome.loss.clone(), cloned(outcome.outputs))

    def _apply(self, batch: Any) -> Any:
        return super()._apply(on_device(batch, self._device))

    @property
    def replays(self) -> str:
        """Describe how steps are launched; see `ReportsReplay`."""
        return with_update(self.replay.message, self._update)

    def _passes(
        self, batch: Any, scale: torch.Tensor
    ) -> tuple[StepOutput, list[torch.Tensor | None]]:
        returned = (self._recipe.forward or apply_model)(self._run, batch)
        loss = self._loss(returned)
        gradients = torch.autograd.grad(
            loss, self._parameters, scale.to(loss.dtype).expand_as(loss), allow_unused=True
        )
        return StepOutput(loss.detach(), detached(returned)), list(gradients)

    def _capture(self, batch: Any) -> _CapturedPasses:
        static = StaticBatch(batch)
        scale, graph = torch.ones((), device=self._device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outcome, gradients = self._passes(static.batch, scale)
        return _CapturedPasses(graph, static, scale, outcome, gradients)

    @torch.no_grad()
    def _add(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)
