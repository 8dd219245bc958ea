"""Training steps with an update in single ops, as a plain loop of PyTorch runs it.

`hocket.capture` records a fused update, one op per parameter. Here AdamW's ops are recorded one by
one inside the same recording, with their passing results, which is where orders differ most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hocket.capture.assemble import graph_of
from hocket.capture.fake import all_tensors, fake_twins, map_batch
from hocket.capture.link import link
from hocket.capture.loss import ChosenLoss
from hocket.capture.record import Recorder
from hocket.capture.step import apply_model
from hocket.capture.swap import swapped_tensors
from hocket.graph import Graph, Phase, Role

_RATE, _DECAY, _MEAN, _SQUARE, _EPSILON = 1e-3, 1e-2, 0.9, 0.999, 1e-8


def plain_step(model: nn.Module, batch: Any, name: str, *, updates: bool = True) -> Graph:
    """Forward, backward and AdamW; without ``updates`` all gradients are held to the end."""
    named = list(all_tensors(model, batch))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        twins = fake_twins([tensor for _, _, tensor in named], "cpu")
    fake_batch = map_batch(batch, twins)
    parameters = [twins[id(p)] for p in model.parameters() if p.requires_grad]
    with mode:
        states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    recorder = Recorder({id(module): path for path, module in model.named_modules()})
    for source, role, tensor in named:
        recorder.add_source(source, role, twins[id(tensor)])
    for number, (mean, square) in enumerate(states if updates else ()):
        recorder.add_source(f"mean {number}", Role.OPTIMIZER_STATE, mean)
        recorder.add_source(f"square {number}", Role.OPTIMIZER_STATE, square)
    single = torch.autograd.set_multithreading_enabled(False)
    with swapped_tensors(model, twins), mode, single, recorder:
        loss = ChosenLoss(None)(apply_model(model, fake_batch))
        recorder.phase = Phase.BACKWARD
        loss.backward()
        if updates:
            _adamw(parameters, states)
    recording = recorder.recording
    for parameter in () if updates else parameters:
        if parameter.grad is not None:
            value = recorder.value_of(parameter)
            recording.gradients[value] = recorder.value_of(parameter.grad)
    recording.outputs = [recorder.value_of(loss)]
    return graph_of(link(recording), name, {})


@torch.no_grad()
def _adamw(parameters: list[Any], states: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, (mean, square) in zip(parameters, states, strict=True):
        gradient = parameter.grad
        if gradient is None:
            continue
        parameter.mul_(1 - _RATE * _DECAY)
        mean.lerp_(gradient, 1 - _MEAN)
        square.mul_(_SQUARE).addcmul_(gradient, gradient, value=1 - _SQUARE)
        scale = (square.sqrt() / (1 - _SQUARE) ** 0.5).add_(_EPSILON)
        parameter.addcdiv_(mean, scale, value=-_RATE / (1 - _MEAN))
        parameter.grad = None


class Branches(nn.Module):
    """Three branches of different width that are added."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.ReLU(), nn.Linear(inner, width))
            for inner in (width, 2 * width, 4 * width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of what the branches make."""
        return sum(branch(x) for branch in self.branches).square().mean()  # type: ignore[union-attr]
