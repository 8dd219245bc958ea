"""Labelled inputs in three splits: train, validation, test.

A user's function returns either ``(inputs, labels)``, which is split here, or a mapping. The
mapping has ``train`` and optionally ``validation`` and ``test``, each ``(inputs, labels)``,
``names`` of the classes, and ``augment``, a function that is applied to a batch. No decision
depends on the test split.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hocket.base.errors import UsageError, did_you_mean
from hocket.classes.training import Augment, Labelled

_KEYS = ("train", "validation", "test", "names", "augment")
_OTHERS = ("validation", "test")
_SHARES = (0.6, 0.8)


@dataclass(frozen=True, eq=False)
class Splits:
    """Training, validation and test data of a classifier."""

    train: Labelled
    validation: Labelled
    test: Labelled
    names: tuple[str, ...]
    augment: Augment | None = None

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.names)

    @property
    def example(self) -> torch.Tensor:
        """The first validation input, as a batch of one."""
        return self.validation.inputs[:1]


def splits_from(given: object, where: str, seed: int = 0) -> Splits:
    """Check the result of a user's function, and split the data if the function has not."""
    if isinstance(given, tuple) and len(given) == 2:
        given = {"train": given}
    if not isinstance(given, Mapping) or "train" not in given:
        raise UsageError(
            f"gave {type(given).__name__}, not inputs and labels",
            hint="return (inputs, labels), or a mapping with 'train', 'validation', 'test'",
            where=where,
        )
    for key in given:
        if key not in _KEYS:
            raise UsageError(
                f"unknown key {key!r}", hint=did_you_mean(str(key), _KEYS), where=where
            )
    train = _labelled(given["train"], f"{where}: train")
    num_classes = int(train.labels.max()) + 1
    names = tuple(map(str, given.get("names") or range(num_classes)))
    if len(names) < num_classes:
        raise UsageError(
            f"has labels up to {num_classes - 1} and {len(names)} names", where=where,
            hint="give one name per class",
        )  # fmt: skip
    others = {key: _labelled(given[key], f"{where}: {key}") for key in _OTHERS if key in given}
    if not others:
        train, others["validation"], others["test"] = _divided(train, _SHARES, seed)
    for key in _OTHERS:
        if key not in others:
            train, others[key], _ = _divided(train, (0.85, 1.0), seed)
    splits = Splits(train, others["validation"], others["test"], names, given.get("augment"))
    _check_shapes(splits, where)
    return splits


def _labelled(pair: Any, where: str) -> Labelled:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise UsageError("is no pair of inputs and labels", where=where)
    try:
        inputs, labels = (torch.as_tensor(each) for each in pair)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"holds what is no array of numbers: {error}",
            hint="labels count classes from 0; their names go under the key 'names'",
            where=where,
        ) from None
    if labels.is_floating_point() and not torch.equal(labels, labels.round()):
        raise UsageError(
            "has labels that are no whole numbers", hint="count classes from 0", where=where
        )
    # Integer inputs are token ids.
    inputs = inputs.float() if inputs.is_floating_point() else inputs.long()
    labels = labels.long().flatten()
    if len(inputs) != len(labels) or not len(labels):
        raise UsageError(
            f"has {len(inputs)} inputs and {len(labels)} labels",
            hint="give one label for each input, the number of its class",
            where=where,
        )
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        raise UsageError("has inputs that are no finite numbers", where=where)
    if int(labels.min()) < 0:
        raise UsageError("has negative labels", hint="count classes from 0", where=where)
    return Labelled(inputs, labels)


def _divided(
    data: Labelled, shares: tuple[float, float], seed: int
) -> tuple[Labelled, Labelled, Labelled]:
    """Split the data in three, with the same fraction of every class in each split."""
    rng = np.random.default_rng(seed)
    places: tuple[list[int], list[int], list[int]] = ([], [], [])
    labels = data.labels.numpy()
    for label in np.unique(labels):
        # Divided per class, so that rare classes are in all three splits.
        mine = rng.permutation(np.flatnonzero(labels == label))
        first, second = (round(share * len(mine)) for share in shares)
        for place, chosen in zip(
            places, (mine[:first], mine[first:second], mine[second:]), strict=True
        ):
            place.extend(chosen.tolist())
    first_split, second_split, third_split = (
        Labelled(data.inputs[sorted(place)], data.labels[sorted(place)]) for place in places
    )
    return first_split, second_split, third_split


def _check_shapes(splits: Splits, where: str) -> None:
    shapes = {
        tuple(each.inputs.shape[1:]) for each in (splits.train, splits.validation, splits.test)
    }
    if len(shapes) > 1:
        raise UsageError(f"has inputs of the shapes {sorted(shapes)}", where=where)
    for name in ("train", "validation", "test"):
        labels = getattr(splits, name).labels
        if not len(labels):
            raise UsageError(
                f"leaves nothing for the {name} split",
                hint="give five inputs of each class or more, or all three splits",
                where=where,
            )
        if int(labels.max()) >= splits.num_classes:
            raise UsageError(
                f"has labels up to {int(labels.max())} in {name} and {splits.num_classes} classes "
                "in train",
                hint="give 'names' of all classes",
                where=where,
            )
    if len(splits.names) < 2:
        raise UsageError("has fewer than two classes", where=where)
