"""Kernels of ``torch.compile``, and a step of them launched as a whole.

``torch.compile`` makes fewer and larger kernels; its own CUDA graphs hold one pass each and leave
the update to the host, which for small models takes longer than all of them. Here forward and
backward are one graph and the update another (`replayed_update`), so the host asks twice per step.
The first steps run without graphs (`repeats`), beside the stream of the others, so that kernels are
made and chosen. Gradients that wait for more are computed without graphs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hocket.capture.step import apply_model
from hocket.runtime.train.batches import on_device, signature_of
from hocket.runtime.train.called import CalledModel, cloned, detached
from hocket.runtime.train.carrier import Carried
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.repeats import NOT_CUDA, Repeats
from hocket.runtime.train.replayed_update import ReplayedUpdate, with_update
from hocket.runtime.train.weight import Weight


class _CapturedPasses(NamedTuple):
    """A graph of a step's passes, with what it reads and makes."""

    graph: torch.cuda.CUDAGraph
    batch: Any
    scale: torch.Tensor
    outcome: Carried
    gradients: list[torch.Tensor | None]


class CompiledModel(CalledModel):
    """A model on one device whose steps are compiled; see `Carrier`."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, device: torch.device, *, backend: str, replay: bool
    ) -> None:
        super().__init__(model.to(device), recipe)
        self._device = device
        self._run: Any = torch.compile(model, dynamic=False, backend=backend)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._is_replayed = replay and device.type == "cuda"
        self._aside = torch.cuda.Stream(device) if self._is_replayed else None  # type: ignore[no-untyped-call]
        self._update: Any = recipe.make_update
        if self._is_replayed and recipe.calls_optimizer:
            self._update = ReplayedUpdate()
        self.repeats: Repeats[_CapturedPasses] = Repeats("" if self._is_replayed else NOT_CUDA)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer."""
        self._update(optimizer)

    def clip(self, max_norm: float) -> None:
        """By the norm of all gradients."""
        torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """All is here."""

    def train(self, batch: Any, step: int, weight: Weight) -> Carried:
        """Forward and backward by compiled kernels."""
        batch = on_device(batch, self._device)
        is_pending = any(parameter.grad is not None for parameter in self._parameters)
        found = None
        if not is_pending:
            found = self.repeats.find(self._key(batch), lambda: self._capture(batch))
        if found is None:
            scale = torch.as_tensor(weight, dtype=torch.float32, device=self._device)
            outcome, gradients = self._passes(batch, scale)
            self._add(gradients)
            return outcome
        graph, static, scale, outcome, gradients = found
        for own, given in zip(tree_leaves(static), tree_leaves(batch), strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given, non_blocking=True)
        scale.fill_(weight)
        graph.replay()
        self._add(gradients)
        return Carried(outcome.loss.clone(), cloned(outcome.outputs))

    def _apply(self, batch: Any) -> Any:
        return super()._apply(on_device(batch, self._device))

    @property
    def replays(self) -> str:
        """How steps are launched; see `TellsReplay`."""
        return with_update(self.repeats.told, self._update)

    def _key(self, batch: Any) -> Any:
        """All that makes a step the same as another, up to the numbers of its batch."""
        if self.repeats.refusal:
            return None
        modes = tuple(module.training for module in self._model.modules())
        places = tuple(tensor.data_ptr() for tensor in self.tensors.values())
        return signature_of(batch), modes, places

    def _passes(self, batch: Any, scale: torch.Tensor) -> tuple[Carried, list[torch.Tensor | None]]:
        here = torch.cuda.current_stream(self._device) if self._aside is not None else None
        if here is None or torch.cuda.is_current_stream_capturing():
            return self._compiled_passes(batch, scale)
        assert self._aside is not None
        self._aside.wait_stream(here)
        with torch.cuda.stream(self._aside):
            found = self._compiled_passes(batch, scale)
        here.wait_stream(self._aside)
        return found

    def _compiled_passes(
        self, batch: Any, scale: torch.Tensor
    ) -> tuple[Carried, list[torch.Tensor | None]]:
        returned = (self._recipe.forward or apply_model)(self._run, batch)
        loss = self._loss(returned)
        gradients = torch.autograd.grad(
            loss, self._parameters, scale.to(loss.dtype).expand_as(loss), allow_unused=True
        )
        return Carried(loss.detach(), detached(returned)), list(gradients)

    def _capture(self, batch: Any) -> _CapturedPasses:
        static = cloned(batch)
        scale, graph = torch.ones((), device=self._device), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outcome, gradients = self._passes(static, scale)
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
