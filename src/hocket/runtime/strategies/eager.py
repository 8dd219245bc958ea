"""Strategies that call the model itself: on one device, placed by modules, or compiled.

`EagerModel` calls the model on one device. `PlacedModules` is for models that cannot be traced op
by op, because their control flow depends on data or their gradients have no fixed size. Each module
with ops of its own is placed on one device; its inputs are copied to that device, and its outputs
to the device of the calling module. Autograd runs the backward pass, so the results are those of
plain PyTorch. Modules do not overlap, and the plan's op order, splits within modules and CUDA graph
replay are lost. `CompiledModel` runs kernels of ``torch.compile`` in CUDA graphs of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.base.arrays import IntArray
from hocket.capture.fake import model_tensors
from hocket.capture.loss import ChosenLoss
from hocket.capture.step import apply_model
from hocket.graph.graph import Graph, Phase
from hocket.runtime.batches import brought, detached, on_device, signature_of
from hocket.runtime.replay import (
    NOT_CUDA,
    GraphReplay,
    ReplayedUpdate,
    StaticBatch,
    cloned,
    model_key,
    on_stream,
    with_update,
)
from hocket.runtime.strategy import StepOutput, Strategy
from hocket.runtime.trace_options import TraceOptions, Weight, in_mode


class EagerModel(Strategy):
    """Strategy that calls the model's own code for every batch."""

    def __init__(
        self, model: nn.Module, recipe: TraceOptions, device: torch.device | None = None
    ) -> None:
        """Batches are moved to ``device``, if given."""
        self._model, self._recipe, self._batch_device = model, recipe, device
        self._loss = ChosenLoss(recipe.loss)
        self.tensors: Mapping[str, torch.Tensor] = {n: t for n, _, t in model_tensors(model)}

    def _apply(self, batch: Any, model: Any = None) -> Any:
        """Return the model's outputs; ``model`` is called in place of the model itself."""
        if self._batch_device is not None:
            batch = on_device(batch, self._batch_device)
        return (self._recipe.forward or apply_model)(self._model if model is None else model, batch)

    def clip(self, max_norm: float) -> None:
        """Clip gradients by their norm, over the parameters that the model has at present."""
        nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run forward and backward of the model."""
        outcome = self.forward(batch, step)
        seed = torch.ones_like(outcome.loss).mul_(weight)
        outcome.loss.backward(seed)  # type: ignore[no-untyped-call]
        return StepOutput(outcome.loss.detach(), detached(outcome.outputs))

    def forward(self, batch: Any, step: int) -> StepOutput:
        """Return loss and outputs of a batch, attached to autograd."""
        returned = self._apply(batch)
        return StepOutput(self._loss(returned), returned)

    def evaluate(self, batch: Any) -> StepOutput:
        """Return the loss, without gradients."""
        with torch.no_grad(), in_mode(self._model, is_training=False):
            return self.forward(batch, 0)

    def predict(self, batch: Any) -> Any:
        """Return the model's outputs in evaluation mode."""
        with torch.no_grad(), in_mode(self._model, is_training=False):
            return self._apply(batch)


class PlacedModules(EagerModel):
    """A model whose modules are on the devices of a plan."""

    def __init__(
        self,
        model: nn.Module,
        recipe: TraceOptions,
        graph: Graph,
        device_of: IntArray,
        devices: Sequence[torch.device],
        *,
        lost: str,
    ) -> None:
        self.lost = lost
        device_of_module = module_devices(model, graph, device_of)
        device_of_path = {path: devices[place] for path, place in device_of_module.items()}
        if len(set(devices)) > 1:
            _place_modules(model, device_of_path)
        super().__init__(model, recipe, device_of_path[""])

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        self._recipe.make_update(optimizer)


def _place_modules(model: nn.Module, device_of_path: Mapping[str, torch.device]) -> None:
    """Move each module to its device, and copy inputs and outputs between devices by hooks."""
    moved: set[int] = set()
    for path, module in model.named_modules():
        device = device_of_path[path]
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            # A tied weight stays with the first module that has it.
            if id(tensor) not in moved:
                moved.add(id(tensor))
                tensor.data = tensor.data.to(device)
        caller = device_of_path[path.rpartition(".")[0]] if path else device
        module.register_forward_pre_hook(_bring_inputs(device), with_kwargs=True)
        # The caller's ops expect results on the caller's device.
        if caller != device:
            module.register_forward_hook(_bring_result(caller))


def module_devices(model: nn.Module, graph: Graph, device_of: IntArray) -> dict[str, int]:
    """Return the device of each module: that of most of its forward work, or of its parent.

    Modules that share a parameter are placed on the device of the first of them.
    """
    work: dict[str, Counter[int]] = {}
    for op in range(graph.num_ops):
        if graph.op_phase[op] == Phase.FORWARD:
            # One more, so that ops without bytes count too.
            weight = 1 + int(graph.bytes_touched[op])
            work.setdefault(graph.module_of(op), Counter())[int(device_of[op])] += weight
    first = next((int(device) for device in device_of), 0)
    places: dict[str, int] = {}
    owner: dict[int, int] = {}
    for path, module in model.named_modules():
        outer = places.get(path.rpartition(".")[0], first)
        place = work[path].most_common(1)[0][0] if path in work else outer
        for parameter in module.parameters(recurse=False):
            place = owner.setdefault(id(parameter), place)
        places[path] = place
    return places


def _bring_inputs(device: torch.device) -> Any:
    return lambda module, args, kwargs: (brought(args, device), brought(kwargs, device))


def _bring_result(device: torch.device) -> Any:
    return lambda module, args, result: brought(result, device)


class _CapturedPasses(NamedTuple):
    """A CUDA graph of forward and backward, with its inputs and results."""

    graph: torch.cuda.CUDAGraph
    batch: StaticBatch
    scale: torch.Tensor
    outcome: StepOutput
    gradients: list[torch.Tensor | None]


class CompiledModel(EagerModel):
    """A model on one device whose steps run kernels of ``torch.compile``.

    The CUDA graphs of ``torch.compile`` itself contain one pass each, and the host launches the
    update, which takes longer than both passes of a small model. Here forward and backward are one
    graph and the update another one (`ReplayedUpdate`), so the host launches twice per step.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: TraceOptions,
        device: torch.device,
        *,
        backend: str,
        replay: bool,
    ) -> None:
        super().__init__(model.to(device), recipe, device)
        self._device = device
        self._run: Any = torch.compile(model, dynamic=False, backend=backend)
        is_replayed = replay and device.type == "cuda"
        # The first steps run on a side stream without a graph: kernels are compiled and chosen
        # there before the capture.
        self._aside = torch.cuda.Stream(device) if is_replayed else None  # type: ignore[no-untyped-call]
        self._update: Any = recipe.make_update
        if is_replayed and recipe.calls_optimizer:
            self._update = ReplayedUpdate()
        self.replay: GraphReplay[_CapturedPasses] = GraphReplay("" if is_replayed else NOT_CUDA)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """Parameters that require gradients at present."""
        return [each for each in self._model.parameters() if each.requires_grad]

    @property
    def replays(self) -> str:
        """Description of how the next step is launched."""
        return with_update(self.replay.message, self._update)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        self._update(optimizer)

    def train(self, batch: Any, step: int, weight: Weight) -> StepOutput:
        """Run forward and backward by compiled kernels."""
        batch = on_device(batch, self._device)
        found = None
        # A graph overwrites gradients, so steps that add to existing gradients run without it.
        if all(p.grad is None for p in self._parameters) and not self.replay.refusal:
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

    def _passes(
        self, batch: Any, scale: torch.Tensor
    ) -> tuple[StepOutput, list[torch.Tensor | None]]:
        returned = self._apply(batch, self._run)
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
            if gradient is not None and parameter.grad is not None:
                parameter.grad.add_(gradient)
            elif gradient is not None:
                parameter.grad = gradient
