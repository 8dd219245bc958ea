"""Strategies that call the model itself: on one device, placed by modules, or compiled.

`PlacedModules` is for models that cannot be traced op by op: their control flow depends on data, or
their gradients have no fixed size. Each module with ops of its own is placed on one device. Its
inputs are copied to that device, and its outputs to the device of the calling module. Autograd runs
the backward pass, so the numbers are those of plain PyTorch. Modules do not overlap, and the plan's
op order, splits within modules and CUDA graph replay are lost. `CompiledModel` runs kernels of
``torch.compile``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hocket.base.arrays import IntArray
from hocket.capture.fake import batch_tensors, map_batch, model_tensors
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
from hocket.runtime.strategy import Passes, StepOutput, Strategy
from hocket.runtime.trace_options import TraceOptions, Weight, in_mode


class EagerModel(Passes):
    """A model that runs its own code for every batch."""

    def __init__(
        self, model: nn.Module, recipe: TraceOptions, device: torch.device | None = None
    ) -> None:
        """Batches are moved to ``device``, if given."""
        self._model, self._recipe, self._batch_device = model, recipe, device
        self._loss = ChosenLoss(recipe.loss)
        self.tensors: Mapping[str, torch.Tensor] = {n: t for n, _, t in model_tensors(model)}

    def _apply(self, batch: Any) -> Any:
        if self._batch_device is not None:
            moved = {
                id(tensor): tensor.to(self._batch_device) for _, tensor in batch_tensors(batch)
            }
            batch = map_batch(batch, moved)
        return (self._recipe.forward or apply_model)(self._model, batch)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        optimizer.step()

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


class PlacedModules(EagerModel, Strategy):
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
        self._model = model
        places = module_places(model, graph, device_of)
        self._devices = {path: devices[place] for path, place in places.items()}
        self._root = self._devices[""]
        if len(set(devices)) > 1:
            self._move()
        super().__init__(model, recipe)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer."""
        self._recipe.make_update(optimizer)

    def clip(self, max_norm: float) -> None:
        """Clip the gradients by their global norm."""
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), max_norm)

    def _apply(self, batch: Any) -> Any:
        return super()._apply(on_device(batch, self._root))

    def _move(self) -> None:
        moved: set[int] = set()
        for path, module in self._model.named_modules():
            device = self._devices[path]
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                # A tied weight stays with the first module that has it; others get it by hooks.
                if id(tensor) not in moved:
                    moved.add(id(tensor))
                    tensor.data = tensor.data.to(device)
            caller = self._devices[path.rpartition(".")[0]] if path else device
            module.register_forward_pre_hook(_bring_inputs(device), with_kwargs=True)
            if caller != device:
                module.register_forward_hook(_bring_result(caller))


def module_places(model: nn.Module, graph: Graph, device_of: IntArray) -> dict[str, int]:
    """Return the device of each module: the one with most of its forward work, else its caller's.

    Modules that share a parameter are placed on the device of the first of them.
    """
    work: dict[str, Counter[int]] = {}
    for op in range(graph.num_ops):
        if graph.op_phase[op] == Phase.FORWARD:
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


# Steps with kernels of ``torch.compile``, replayed as CUDA graphs.
#
# ``torch.compile`` generates fewer and larger kernels; its own CUDA graphs hold one pass each and
# leave the update to the host, which for small models takes longer than both passes. Here forward
# and backward are one graph and the update another (`ReplayedUpdate`), so the host launches twice
# per step. The first steps run without graphs on a side stream, so that kernels are compiled and
# chosen before the capture. Steps that add to existing gradients run without graphs.


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
