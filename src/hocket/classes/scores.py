"""What each channel is worth to each class, and the embedding of each class.

One pass over training images, in evaluation mode: the mean activation of every channel over the
images of a class (sensAI's criterion, without its thresholds), times the weight with which the next
layers read it; of every residual block the share of what it adds in what it hands on. The embedding
of a class is the mean input of the head over its images. O(images).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.base.arrays import FloatArray
from hocket.classes.blocks import passing
from hocket.classes.structure import StreamParts, Structure

_BATCH = 256
_BLOCK = "block "
"""Before the name of a block, which may be that of a layer too."""


@dataclass(frozen=True, eq=False)
class ClassScores:
    """What one pass over the training images tells."""

    embeddings: FloatArray
    """``[class, feature]``"""
    units: tuple[FloatArray, ...]
    """For each stream ``[class, unit]``: the share of the class's value that a unit has."""
    blocks: FloatArray
    """``[class, block]``: what a block adds, as a share of that and of what it adds to."""

    def of_group(self, classes: tuple[int, ...]) -> list[FloatArray]:
        """What each unit of each stream is worth to a group of classes."""
        return [values[list(classes)].mean(axis=0) for values in self.units]

    def influence(self, classes: tuple[int, ...]) -> FloatArray:
        """What each block adds for a group of classes."""
        means: FloatArray = self.blocks[list(classes)].mean(axis=0)
        return means


def class_scores(
    net: nn.Module,
    structure: Structure,
    images: torch.Tensor,
    labels: torch.Tensor,
    num_classes: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ClassScores:
    """Scores of all classes from labelled images."""
    device = next(net.parameters()).device
    observed = {name for each in structure.parts for name in _observed(each)}
    counts = torch.zeros(num_classes, device=device)
    names = [block.name for block in structure.model.blocks]
    with (
        _recording(net.eval(), observed, structure.head) as (outputs, features),
        passing(net, names) as passed,
        torch.no_grad(),
    ):
        sums: dict[str, torch.Tensor] = {}
        for start in range(0, len(images), _BATCH):
            batch = images[start : start + _BATCH].to(device)
            classes = labels[start : start + _BATCH].to(device)
            passed.clear()
            net(batch)
            counts.index_add_(0, classes, torch.ones(len(classes), device=device))
            added = [(_BLOCK + name, _added_share(given, result)) for name, given, result in passed]
            for name, value in (*outputs.items(), *added, ("", features[0])):
                if name not in sums:
                    sums[name] = torch.zeros(num_classes, value.shape[1], device=device)
                sums[name].index_add_(0, classes, value.float())
            on_progress(min(start + _BATCH, len(images)), len(images))
    means = {
        name: (each / counts[:, None].clamp(min=1)).cpu().numpy() for name, each in sums.items()
    }
    units = tuple(
        _units(net, each, means, stream.units)
        for each, stream in zip(structure.parts, structure.model.streams, strict=True)
    )
    blocks = [means[_BLOCK + name][:, 0] for name in names]
    shares = np.stack(blocks, axis=1) if blocks else np.zeros((num_classes, 0))
    return ClassScores(means[""].astype(np.float64), units, shares.astype(np.float64))


def _added_share(given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """For each image, the size of what a block adds, in that and in what it adds to."""
    before = given.float().flatten(1).norm(dim=1)
    added = (result - given).float().flatten(1).norm(dim=1)
    shares: torch.Tensor = added / (before + added).clamp(min=1e-30)
    return shares[:, None]


def _observed(parts: StreamParts) -> tuple[str, ...]:
    """Where a stream is looked at: behind its norms, or the layers themselves."""
    return parts.norms or parts.producers


@contextmanager
def _recording(
    net: nn.Module, names: set[str], head: str
) -> Iterator[tuple[dict[str, torch.Tensor], list[torch.Tensor]]]:
    """Mean activations per image and channel of the last batch, and the head's inputs."""
    outputs: dict[str, torch.Tensor] = {}
    features: list[torch.Tensor] = [torch.empty(0)]

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, given: Any) -> None:
            output = given[0] if isinstance(given, tuple) else given
            # What a rectifier would stop counts for nothing, and most layers stand before one.
            value = output.clamp(min=0) + 0.1 * output.clamp(max=0).abs()
            last = isinstance(module, (nn.Linear, nn.Embedding, nn.LSTM))
            dims = tuple(range(1, value.ndim - 1)) if last else tuple(range(2, value.ndim))
            outputs[name] = value.mean(dims) if dims else value

        return hook

    def look(module: nn.Module, inputs: Any) -> None:
        features[0] = inputs[0].detach().flatten(1)

    hooks = [net.get_submodule(name).register_forward_hook(watch(name)) for name in names]
    hooks.append(net.get_submodule(head).register_forward_pre_hook(look))
    try:
        yield outputs, features
    finally:
        for hook in hooks:
            hook.remove()


def _units(
    net: nn.Module, parts: StreamParts, means: dict[str, FloatArray], num_units: int
) -> FloatArray:
    """``[class, unit]``, the units of a class adding up to one."""
    width = num_units * parts.heads
    read = _reading_weights(net, parts, width)
    total = 0.0
    for name in _observed(parts):
        values = means[name].astype(np.float64) * read
        total = total + values / np.maximum(values.sum(axis=1, keepdims=True), 1e-30)
    assert isinstance(total, np.ndarray)
    units = total.reshape(len(total), parts.heads, num_units).sum(axis=1)
    shares: FloatArray = units / np.maximum(units.sum(axis=1, keepdims=True), 1e-30)
    return shares


def _reading_weights(net: nn.Module, parts: StreamParts, width: int) -> FloatArray:
    """Root of the summed squares of the weights that read each channel."""
    squares = np.zeros(width)
    for reader in parts.readers:
        module = net.get_submodule(reader.name)
        weight = module.weight_ih_l0 if isinstance(module, nn.LSTM) else module.weight
        assert isinstance(weight, torch.Tensor)
        weight = weight.detach()
        if weight.shape[1] == 1 and len(reader.inputs) > 1:
            each = weight.flatten(1).square().sum(dim=1)  # depthwise: one filter per channel
        else:
            each = weight.transpose(0, 1).flatten(1).square().sum(dim=1)
        norms = (each / each.sum().clamp(min=1e-30)).cpu().numpy()
        np.add.at(squares, list(reader.channel_of_input), norms[list(reader.inputs)])
    return np.sqrt(squares + 1e-12)
