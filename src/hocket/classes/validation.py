"""Validate a split: accuracy of every stage and with lost workers, and times.

All decisions were made on the validation split; the test split is used here only, once.
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
    """Accuracy on validation data and time of the slowest part after a stage of the split."""

    name: str
    accuracy: float
    slowest_s: float


@dataclass(frozen=True)
class LostWorkers:
    """Accuracy on test data if a number of workers does not answer."""

    lost: int
    patterns: int
    mean: float
    worst: float


@dataclass(frozen=True)
class Validation:
    """The results of a split, as data for the report."""

    stages: tuple[StageScore, ...]
    test_whole: float
    test_parts: float
    test_error: float
    """Standard error of the difference of the two test accuracies, paired by input."""
    num_test: int
    accuracy_loss: float
    """Percentage points lost on validation data."""
    allowed_loss: float
    asked_s: float | None
    """Requested seconds per answer; None without a target."""
    target_s: float | None
    """Maximum time of the slowest part with which an answer meets the target; None without a
    target.
    """
    slowest_s: float
    predicted_s: float
    cores: int
    losses: tuple[Losses, ...]
    lost_workers: tuple[LostWorkers, ...]
    verdict: SplitVerdict
    pruned_overlap: tuple[tuple[float, ...], ...] = ()
    """``[class][class]``: intersection over union of the channels pruned for each class alone."""

    @property
    def holds(self) -> bool:
        """True if no more accuracy was lost than is allowed."""
        return self.accuracy_loss <= self.allowed_loss + 1e-9

    def to_data(self) -> dict[str, Any]:
        """Return JSON-serialisable data."""
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
    """Evaluate the finished parts on the test split."""
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
        verdict(table.whole.latency_s, predicted_s, macs, table.whole.macs, cores),
        tuple(tuple(round(float(each), 4) for each in row) for row in overlap),
    )


def paired_error(first: FloatArray, second: FloatArray, labels: LongArray) -> float:
    """Standard error of the difference of two accuracies on the same inputs."""
    # Both nets see the same inputs, so the error of the difference is smaller than that of each
    # accuracy.
    apart = (first.argmax(axis=1) == labels).astype(float) - (second.argmax(axis=1) == labels)
    return float(apart.std(ddof=1) / sqrt(len(labels))) if len(labels) > 1 else 0.0


def lost_workers(
    combiner: Combiner, outputs: Sequence[FloatArray], labels: LongArray, most: int
) -> tuple[LostWorkers, ...]:
    """Accuracy with 0 to ``most`` workers lost, over all patterns of lost workers.

    The table ends at the first number of lost workers with too many patterns.
    """
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
