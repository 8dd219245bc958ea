"""Inputs of a split: the trained net, its data, its streams and the value of their channels.

The inputs follow from the request alone, so an interrupted split rebuilds them. Training and
scoring are loaded from finished steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.base.arrays import BoolArray, FloatArray
from hocket.base.errors import UsageError
from hocket.classes.blocks import passing
from hocket.classes.data import Splits
from hocket.classes.settings import HybridCriterion, SplitRequest
from hocket.classes.sources import load_arrays, load_data, load_net, state_arrays
from hocket.classes.steps import Steps, digest_of_state, key_of
from hocket.classes.structure import (
    StreamParts,
    Structure,
    find_head,
    multiplications,
    structure_of,
)
from hocket.classes.training import Labelled, train_whole

# Value of each channel for each class, and the embedding of each class, from one pass over training
# images in evaluation mode. The value is the mean activation of the channel over the images of a
# class, times the weight with which the next layers read it. sensAI's criterion also needs the
# fraction of activations near zero and their plain mean. A block's influence is its fraction of the
# sum that it enters. The embedding of a class is the mean input of the head. O(images).

_BATCH = 256
_NEAR_ZERO = 0.005
"""Activations up to this value count as zero, as in sensAI."""
_BLOCK, _ZEROS, _RECTIFIED = "block ", "zeros ", "rectified "
"""Key prefixes that separate statistics of blocks and layers, whose names may be equal."""


@dataclass(frozen=True, eq=False)
class ClassScores:
    """Statistics per class from one pass over the training images."""

    embeddings: FloatArray
    """``[class, feature]``: mean input of the head."""
    units: tuple[FloatArray, ...]
    """For each stream ``[class, unit]``: value of a unit to a class; the units add up to 1."""
    blocks: FloatArray
    """``[class, block]``: norm of a block's output as a fraction of the sum that it enters."""
    near_zero: tuple[FloatArray, ...] = ()
    """For each stream ``[class, unit]``: fraction of its rectified activations near zero."""
    rectified: tuple[FloatArray, ...] = ()
    """For each stream ``[class, unit]``: mean of its rectified activations."""

    def pruned(self, classes: tuple[int, ...], test: HybridCriterion) -> list[BoolArray]:
        """Masks of the units that sensAI's criterion prunes for a group of classes, per stream."""
        return [
            (zero[list(classes)].mean(axis=0) > test.theta1)
            & (mean[list(classes)].mean(axis=0) < test.theta2)
            for zero, mean in zip(self.near_zero, self.rectified, strict=True)
        ]

    def of_group(self, classes: tuple[int, ...]) -> list[FloatArray]:
        """Value of each unit of each stream to a group of classes."""
        return [values[list(classes)].mean(axis=0) for values in self.units]

    def influence(self, classes: tuple[int, ...]) -> FloatArray:
        """Mean norm fraction of each block (`blocks`) over a group of classes."""
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
    """Compute the statistics of all classes from labelled images."""
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
    # Computed for all requests, so that another criterion needs no second pass.
    near_zero, rectified = (
        tuple(
            _of_units(kind, each, means, stream.units)
            for each, stream in zip(structure.parts, structure.model.streams, strict=True)
        )
        for kind in (_ZEROS, _RECTIFIED)
    )
    return ClassScores(means[""].astype(np.float64), units, shares.astype(np.float64),
                       near_zero, rectified)  # fmt: skip


def _of_units(
    kind: str, parts: StreamParts, means: dict[str, FloatArray], num_units: int
) -> FloatArray:
    """Means ``[class, unit]`` of a statistic.

    sensAI prunes only channels of a single layer that is followed by a rectifier, so other streams,
    such as residual sums, get values that never pass its test.
    """
    (name, *others) = _observed(parts)
    if others or parts.heads > 1:
        return np.full((len(means[name]), num_units), 0.0 if kind == _ZEROS else np.inf)
    return means[kind + name].astype(np.float64)


def _added_share(given: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """For each image: norm of a block's output as a fraction of the sum that it enters."""
    before = given.float().flatten(1).norm(dim=1)
    added = (result - given).float().flatten(1).norm(dim=1)
    shares: torch.Tensor = added / (before + added).clamp(min=1e-30)
    return shares[:, None]


def _observed(parts: StreamParts) -> tuple[str, ...]:
    """Modules whose outputs are recorded for a stream: its norms, or else its layers."""
    return parts.norms or parts.producers


@contextmanager
def _recording(
    net: nn.Module, names: set[str], head: str
) -> Iterator[tuple[dict[str, torch.Tensor], list[torch.Tensor]]]:
    """Record the last batch's mean activations per image and channel, and the head's inputs."""
    outputs: dict[str, torch.Tensor] = {}
    features: list[torch.Tensor] = [torch.empty(0)]

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            # A rectifier stops negative activations, and most layers are followed by one, so they
            # count a tenth.
            value = output.clamp(min=0) + 0.1 * output.clamp(max=0).abs()
            last = isinstance(module, (nn.Linear, nn.Embedding))
            dims = tuple(range(1, value.ndim - 1)) if last else tuple(range(2, value.ndim))
            rectified = output.clamp(min=0)
            for key, each in (
                (name, value),
                (_ZEROS + name, (rectified <= _NEAR_ZERO).float()),
                (_RECTIFIED + name, rectified),
            ):
                outputs[key] = each.mean(dims) if dims else each

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
    """Values ``[class, unit]`` of a stream's units; those of a class add up to 1."""
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
    """L2 norm of the weights that read each channel."""
    squares = np.zeros(width)
    for reader in parts.readers:
        module = net.get_submodule(reader.name)
        weight: Any = module.weight
        weight = weight.detach()
        if weight.shape[1] == 1 and len(reader.inputs) > 1:
            each = weight.flatten(1).square().sum(dim=1)  # depthwise: one filter per channel
        else:
            each = weight.transpose(0, 1).flatten(1).square().sum(dim=1)
        norms = (each / each.sum().clamp(min=1e-30)).cpu().numpy()
        np.add.at(squares, list(reader.channel_of_input), norms[list(reader.inputs)])
    return np.sqrt(squares + 1e-12)


Progress = Callable[[str, int, int], None]
"""Called with the name of a step, the finished amount and the total amount."""
_WORTH_THREADS_MACS = 20e6
_PER_STREAM = ("units", "near_zero", "rectified")
"""Fields of `ClassScores` with one array per stream."""
_MOST_SCORED = 10_000
"""Maximum number of training images for scoring channels; more images hardly change the means."""


@dataclass(frozen=True, eq=False)
class Material:
    """The trained net with its data, structure and scores."""

    request: SplitRequest
    net: nn.Module
    splits: Splits
    structure: Structure
    scores: ClassScores
    digest: str
    """Digest that identifies the net's weights and the data."""

    @property
    def example(self) -> torch.Tensor:
        """One input as a batch, on the CPU."""
        return self.splits.example.cpu()

    @property
    def whole_macs(self) -> float:
        """Multiplications of the unsplit net for one input."""
        return self.structure.model.macs(np.ones(len(self.structure.parts)))


def prepared(request: SplitRequest, steps: Steps, progress: Progress) -> Material:
    """Load net and data, train the net if requested, and score its channels."""
    splits = load_data(request.data, request.seed)
    net = load_net(request.net, request.seed)
    _check_answers(net, splits, request.net)
    first, last = (splits.train.inputs[place].numpy() for place in (0, -1))
    labels = splits.train.labels.numpy()
    # The first and last input represent all inputs: hashing gigabytes of images would take longer.
    given = key_of(digest_of_state(state_arrays(net)), labels, first, last)
    device = _device(request.device)
    _choose_threads(net, splits)
    # Batches are selected on the device, so that steps wait for no copy.
    net, splits = net.to(device), moved(splits, device)
    key = _train(net, splits, request, steps, given, progress)
    return described(request, net, splits, steps, key, progress)


def described(
    request: SplitRequest,
    net: nn.Module,
    splits: Splits,
    steps: Steps,
    key: str,
    progress: Progress,
) -> Material:
    """Find the structure of a trained net and score its channels for each class."""
    example = splits.example.to(next(net.parameters()).device)
    structure = structure_of(net, example, splits.num_classes)
    scores = _scores(net, structure, splits, steps, key, progress)
    return Material(request, net.eval(), splits, structure, scores, key)


def _train(
    net: nn.Module,
    splits: Splits,
    request: SplitRequest,
    steps: Steps,
    given: str,
    progress: Progress,
) -> str:
    """Train the net if requested; return a digest of all that its weights depend on."""
    if not request.train_steps:
        return given
    recipe = replace(request.retraining, steps=request.train_steps, seed=request.seed)
    key = key_of(given, recipe.__dict__)
    saved = steps.get("whole", key)
    if saved is None:
        train_whole(
            net, splits.train, recipe, splits.augment, lambda *far: progress("train the net", *far)
        )
        steps.put("whole", key, state_arrays(net))
    else:
        load_arrays(net, saved)
    return key


def _scores(
    net: nn.Module, structure: Structure, splits: Splits, steps: Steps, key: str, progress: Progress
) -> ClassScores:
    saved = steps.get("class scores", key)
    if saved is None:
        chosen = _scored(splits.train)
        scores = class_scores(
            net, structure, chosen.inputs, chosen.labels, splits.num_classes,
            lambda *far: progress("score channels", *far),
        )  # fmt: skip
        found = {"embeddings": scores.embeddings, "blocks": scores.blocks}
        for name in _PER_STREAM:
            for index, each in enumerate(getattr(scores, name)):
                found[f"{name}{index}"] = each
        saved = steps.put("class scores", key, found)
    of_streams = {
        name: tuple(saved[f"{name}{index}"] for index in range(len(structure.parts)))
        for name in _PER_STREAM
    }
    return ClassScores(saved["embeddings"], blocks=saved["blocks"], **of_streams)


def _scored(data: Labelled) -> Labelled:
    if len(data.labels) <= _MOST_SCORED:
        return data
    index = torch.linspace(0, len(data.labels) - 1, _MOST_SCORED).long().to(data.labels.device)
    return Labelled(data.inputs[index], data.labels[index])


def _choose_threads(net: nn.Module, splits: Splits) -> None:
    """Use one thread for a small net, for which several threads wait more than they compute."""
    if sum(multiplications(net, splits.example).values()) < _WORTH_THREADS_MACS:
        torch.set_num_threads(1)


def _check_answers(net: nn.Module, splits: Splits, where: str) -> None:
    try:
        with torch.no_grad():
            answer: Any = net(splits.example)
    except Exception as error:
        shape = tuple(splits.example.shape)
        # Images given as bytes are the usual reason for a failing net.
        is_tokens = not splits.example.is_floating_point()
        raise UsageError(
            f"the net fails on an input of shape {shape}: {type(error).__name__}: {error}",
            hint="whole numbers are taken for tokens: give images as floats"
            if is_tokens
            else "check that net and data belong together",
            where=where,
        ) from error
    expected = (1, splits.num_classes)
    if not isinstance(answer, torch.Tensor) or tuple(answer.shape) != expected:
        got = tuple(answer.shape) if isinstance(answer, torch.Tensor) else type(answer).__name__
        raise UsageError(
            f"the net answers {got}, not {expected}",
            hint="it must give one score per class; 'names' in the data list classes without "
            "inputs",
            where=where,
        )
    _check_end(net, splits, answer, where)


def _check_end(net: nn.Module, splits: Splits, answer: torch.Tensor, where: str) -> None:
    """Raise `UsageError` unless the net returns the outputs of its last linear layer as scores.

    A part replaces that layer, so only a constant that is equal for all classes may be added after
    it.
    """
    # One more class: if the scores stay equal, nothing after the head depends on the number of
    # classes.
    probe = deepcopy(net)
    name = find_head(probe, splits.num_classes)
    old: Any = probe.get_submodule(name)
    wider = nn.Linear(old.in_features, splits.num_classes + 1)
    with torch.no_grad():
        wider.weight[: splits.num_classes].copy_(old.weight)
        wider.bias[: splits.num_classes].copy_(torch.zeros(()) if old.bias is None else old.bias)
        probe.set_submodule(name, wider)
        try:
            scores = probe(splits.example)[:, : splits.num_classes]
            # A constant that all scores share, such as that of log-softmax, changes nothing.
            apart = scores.log_softmax(1) - answer.log_softmax(1)
            is_kept = bool(apart.abs().max() < 1e-3)
        except (RuntimeError, IndexError):
            is_kept = False
    if not is_kept:
        raise UsageError(
            f"what the net answers is not what its last linear layer {name!r} gives",
            hint="return the scores themselves, without a softmax or weights per class after them",
            where=where,
        )


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"cannot use the device {name!r}: {error}", hint="leave it out") from None
    return device


def moved(splits: Splits, device: torch.device) -> Splits:
    """Copy all splits to a device."""

    def move(data: Labelled) -> Labelled:
        return Labelled(data.inputs.to(device), data.labels.to(device))

    if device.type == "cpu":
        return splits
    return replace(splits, train=move(splits.train), validation=move(splits.validation),
                   test=move(splits.test))  # fmt: skip
