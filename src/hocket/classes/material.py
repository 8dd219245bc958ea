"""What a split starts from: the trained net, its data, its streams and what they are worth.

Every process of a split makes it from the same request; what took long is taken from finished
steps.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from hocket.base.errors import UsageError
from hocket.classes.data import Splits
from hocket.classes.scores import ClassScores, class_scores
from hocket.classes.settings import SplitRequest
from hocket.classes.sources import load_arrays, load_data, load_net, state_arrays
from hocket.classes.steps import Steps, digest_of_state, key_of
from hocket.classes.structure import Structure, find_head, multiplications, structure_of
from hocket.classes.training import Labelled, train_whole

Tell = Callable[[str, int, int], None]
"""Told of progress: what is done, how much of it, of how much."""
_WORTH_THREADS_MACS = 20e6
_MOST_SCORED = 10_000
"""Training images that channels are scored with: their means change little beyond."""


@dataclass(frozen=True, eq=False)
class Material:
    """The trained net and all that is known of it."""

    request: SplitRequest
    net: nn.Module
    splits: Splits
    structure: Structure
    scores: ClassScores
    digest: str
    """Of the net and the data."""

    @property
    def example(self) -> torch.Tensor:
        """One input as a batch, on the processor."""
        return self.splits.example.cpu()

    @property
    def whole_macs(self) -> float:
        """Multiplications of the whole net for one input."""
        return self.structure.model.macs(np.ones(len(self.structure.parts)))


def prepared(request: SplitRequest, steps: Steps, tell: Tell) -> Material:
    """Load, train where asked, and score."""
    splits = load_data(request.data, request.seed)
    net = load_net(request.net, request.seed)
    _check_answers(net, splits, request.net)
    first, last = (splits.train.inputs[place].numpy() for place in (0, -1))
    labels = splits.train.labels.numpy()
    given = key_of(digest_of_state(state_arrays(net)), labels, first, last)
    device = _device(request.device)
    _choose_threads(net, splits)
    net, splits = net.to(device), moved(splits, device)
    key = _train(net, splits, request, steps, given, tell)
    return described(request, net, splits, steps, key, tell)


def described(
    request: SplitRequest, net: nn.Module, splits: Splits, steps: Steps, key: str, tell: Tell
) -> Material:
    """A trained net with its channels and what they are worth to each class."""
    example = splits.example.to(next(net.parameters()).device)
    structure = structure_of(net, example, splits.num_classes)
    scores = _scores(net, structure, splits, steps, key, tell)
    return Material(request, net.eval(), splits, structure, scores, key)


def _train(
    net: nn.Module, splits: Splits, request: SplitRequest, steps: Steps, given: str, tell: Tell
) -> str:
    """Train the net if that was asked for; a digest of what it is then."""
    if not request.train_steps:
        return given
    recipe = replace(request.retraining, steps=request.train_steps, seed=request.seed)
    key = key_of(given, recipe.__dict__)
    saved = steps.get("whole", key)
    if saved is None:
        train_whole(
            net, splits.train, recipe, splits.augment, lambda *far: tell("train the net", *far)
        )
        steps.put("whole", key, state_arrays(net))
    else:
        load_arrays(net, saved.arrays)
    return key


def _scores(
    net: nn.Module, structure: Structure, splits: Splits, steps: Steps, key: str, tell: Tell
) -> ClassScores:
    saved = steps.get("scores", key)
    if saved is None:
        chosen = _scored(splits.train)
        scores = class_scores(
            net, structure, chosen.inputs, chosen.labels, splits.num_classes,
            lambda *far: tell("score channels", *far),
        )  # fmt: skip
        arrays = {f"stream{index}": each for index, each in enumerate(scores.units)}
        found = {**arrays, "embeddings": scores.embeddings, "blocks": scores.blocks}
        saved = steps.put("scores", key, found)
    units = tuple(saved.arrays[f"stream{index}"] for index in range(len(structure.parts)))
    return ClassScores(saved.arrays["embeddings"], units, saved.arrays["blocks"])


def _scored(data: Labelled) -> Labelled:
    if len(data.labels) <= _MOST_SCORED:
        return data
    index = torch.linspace(0, len(data.labels) - 1, _MOST_SCORED).long().to(data.labels.device)
    return Labelled(data.inputs[index], data.labels[index])


def _choose_threads(net: nn.Module, splits: Splits) -> None:
    """One thread for small nets: several would wait for each other longer than they compute."""
    if sum(multiplications(net, splits.example).values()) < _WORTH_THREADS_MACS:
        torch.set_num_threads(1)


def _check_answers(net: nn.Module, splits: Splits, where: str) -> None:
    try:
        with torch.no_grad():
            answer: Any = net(splits.example)
    except Exception as error:
        shape = tuple(splits.example.shape)
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
            hint="it must give one score per class; 'names' in the data tell of classes without "
            "inputs",
            where=where,
        )
    _check_end(net, splits, answer, where)


def _check_end(net: nn.Module, splits: Splits, answer: torch.Tensor, where: str) -> None:
    """That scores are those of the last linear layer: a part has others in its place."""
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
            # A constant that all scores share, as of a logarithm of shares, changes nothing.
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
    """All data on a device."""

    def move(data: Labelled) -> Labelled:
        return Labelled(data.inputs.to(device), data.labels.to(device))

    if device.type == "cpu":
        return splits
    return replace(splits, train=move(splits.train), validation=move(splits.validation),
                   test=move(splits.test))  # fmt: skip
