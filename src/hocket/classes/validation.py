"""Validation of a split: accuracy of every stage, of lost workers, confusion between groups, times.

Decisions were made on the validation split; the test split is looked at here, once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from math import comb, sqrt
from typing import Any

import numpy as np
from torch import nn

from hocket.base.arrays import FloatArray, LongArray
from hocket.classes.codes import Losses, pattern_table
from hocket.classes.combine import Combiner, accuracy
from hocket.classes.latency_forecast import SplitVerdict, verdict
from hocket.classes.material import Material
from hocket.classes.table import PartTable
from hocket.classes.training import outputs_of

_MOST_PATTERNS = 500


@dataclass(frozen=True)
class StageScore:
    """Accuracy on validation data and time of the slowest part after a stage."""

    name: str
    accuracy: float
    slowest_s: float


@dataclass(frozen=True)
class LostWorkers:
    """Accuracy on test data when some workers do not answer."""

    lost: int
    patterns: int
    mean: float
    worst: float


@dataclass(frozen=True)
class Validation:
    """The report of a split, as data."""

    stages: tuple[StageScore, ...]
    test_whole: float
    test_parts: float
    test_error: float
    """Standard error of the difference of both, paired by input."""
    num_test: int
    accuracy_loss: float
    """Points lost on validation data."""
    allowed_loss: float
    asked_s: float | None
    """Of an answer; None where no target was asked for."""
    target_s: float | None
    """Of the slowest part, so that an answer is within what was asked for."""
    slowest_s: float
    predicted_s: float
    cores: int
    losses: tuple[Losses, ...]
    lost_workers: tuple[LostWorkers, ...]
    confusion: tuple[tuple[int, ...], ...]
    """``[true group][answered group]``, test inputs."""
    verdict: SplitVerdict
    pruned_overlap: tuple[tuple[float, ...], ...] = ()
    """``[class][class]``: intersection over union of the channels pruned for each class alone."""

    @property
    def holds(self) -> bool:
        """True if no more accuracy was lost than allowed."""
        return self.accuracy_loss <= self.allowed_loss + 1e-9

    def to_data(self) -> dict[str, Any]:
        """As JSON can write it."""
        return {**asdict(self), "holds": self.holds}


def validated(
    material: Material,
    table: PartTable,
    parts: Sequence[nn.Module],
    stages: Sequence[StageScore],
    cores: int,
    target_s: float | None,
    predicted_s: float,
    overlap: FloatArray,
) -> Validation:
    """Try the finished parts on the test split."""
    test = material.splits.test
    labels = test.labels.cpu().numpy()
    outputs = [outputs_of(part, test.inputs).numpy().astype(float) for part in parts]
    whole = outputs_of(material.net, test.inputs).numpy()
    combiner = table.combiner()
    scores = combiner.scores(outputs)
    part_s = [part.latency_s for part in table.parts]
    macs = [part.macs for part in table.parts]
    best = max(stage.accuracy for stage in stages[1:])
    return Validation(
        tuple(stages),
        accuracy(whole, labels),
        accuracy(scores, labels),
        paired_error(whole, scores, labels),
        len(labels),
        100 * (stages[0].accuracy - best),
        material.request.accuracy_loss,
        material.request.target_s,
        target_s,
        max(part_s),
        predicted_s,
        cores,
        pattern_table(table.held, table.redundancy + 1),
        lost_workers(combiner, outputs, labels, table.redundancy),
        _confusion(table, scores, labels),
        verdict(table.whole.latency_s, predicted_s, macs, table.whole.macs, cores),
        tuple(tuple(round(float(each), 4) for each in row) for row in overlap),
    )


def paired_error(first: FloatArray, second: FloatArray, labels: LongArray) -> float:
    """Standard error of the difference of two accuracies on the same inputs."""
    apart = (first.argmax(axis=1) == labels).astype(float) - (second.argmax(axis=1) == labels)
    return float(apart.std(ddof=1) / sqrt(len(labels))) if len(labels) > 1 else 0.0


def lost_workers(
    combiner: Combiner, outputs: Sequence[FloatArray], labels: LongArray, most: int
) -> tuple[LostWorkers, ...]:
    """Accuracy with up to ``most`` workers lost, every pattern tried."""
    rows = []
    for lost in range(min(most, len(outputs) - 1) + 1):
        if comb(len(outputs), lost) > _MOST_PATTERNS:
            break
        found = [
            accuracy(
                combiner.scores(
                    [None if index in gone else each for index, each in enumerate(outputs)]
                ),
                labels,
            )
            for gone in combinations(range(len(outputs)), lost)
        ]
        rows.append(LostWorkers(lost, len(found), float(np.mean(found)), min(found)))
    return tuple(rows)


def _confusion(
    table: PartTable, scores: FloatArray, labels: LongArray
) -> tuple[tuple[int, ...], ...]:
    group_of = np.zeros(len(table.class_names), dtype=int)
    for index, group in enumerate(table.groups):
        group_of[list(group)] = index
    counts = np.zeros((len(table.groups), len(table.groups)), dtype=int)
    np.add.at(counts, (group_of[labels], group_of[scores.argmax(axis=1)]), 1)
    return tuple(tuple(int(each) for each in row) for row in counts)
