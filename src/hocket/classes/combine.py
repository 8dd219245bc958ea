"""Combine the outputs of parts into scores over all classes.

Each part outputs, for each of its classes, the log-odds against "others". A scale and a shift per
part, fitted on validation data, make log-odds of different parts comparable. The score of a class
held by several parts is the mean over those that answered. A class without an answer is missing.
O(parts · classes).

A mean of n answers out of m is noisier than one of m, and the maximum of noisy scores is too high.
The mean is therefore multiplied by (n / m)^doubt. Doubt 0 (the mean) is right for parts whose
errors are equal, doubt 1 (the sum) for parts whose errors are independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hocket.base.arrays import FloatArray, LongArray


@dataclass(frozen=True)
class OddsCalibration:
    """Scale and shift that make a part's log-odds comparable with those of other parts."""

    scale: float = 1.0
    shift: float = 0.0


def log_odds(logits: FloatArray) -> FloatArray:
    """Log-odds of each class against "others", the first output of a part."""
    return logits[..., 1:] - logits[..., :1]


@dataclass(frozen=True, eq=False)
class Combiner:
    """Parts and their calibration, ready to combine answers."""

    num_classes: int
    classes: tuple[tuple[int, ...], ...]
    """Classes of each part."""
    calibrations: tuple[OddsCalibration, ...]
    doubt: float = 0.0
    """Exponent that lowers the score of a class if only some of its parts have answered."""

    def scores(self, answers: Sequence[FloatArray | None]) -> FloatArray:
        """Scores of all classes from the raw outputs of parts; ``-inf`` if no part answered.

        Each answer is an array ``[..., 1 + number of the part's classes]``, or None if there is
        none.
        """
        lead = next((answer.shape[:-1] for answer in answers if answer is not None), ())
        total = np.zeros((*lead, self.num_classes))
        copies = np.zeros(self.num_classes)
        for index, calibration, answer in zip(
            self._indices, self.calibrations, answers, strict=True
        ):
            if answer is None:
                continue
            total[..., index] += calibration.scale * log_odds(answer) + calibration.shift
            copies[index] += 1
        came = np.maximum(copies, 1)
        return np.where(copies > 0, total / came * (came / self._most) ** self.doubt, -np.inf)

    @cached_property
    def _indices(self) -> list[LongArray]:
        return [np.array(classes, dtype=np.int64) for classes in self.classes]

    @cached_property
    def _most(self) -> FloatArray:
        """Number of answers per class if no worker is lost."""
        return np.maximum(self.copies([True] * len(self.classes)), 1)

    def copies(self, has_answered: Sequence[bool]) -> FloatArray:
        """Number of answers for each class."""
        copies = np.zeros(self.num_classes)
        for index, came in zip(self._indices, has_answered, strict=True):
            if came:
                copies[index] += 1
        return copies


def probabilities(scores: FloatArray) -> FloatArray:
    """Softmax of the scores; missing classes get probability 0."""
    if not np.isfinite(scores).any():
        return np.zeros_like(scores)
    # Shifted by the maximum, so that the exponential cannot overflow.
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares: FloatArray = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def accuracy(scores: FloatArray, labels: LongArray) -> float:
    """Fraction of inputs whose highest score is that of their label."""
    return float(np.mean(scores.argmax(axis=-1) == labels))
