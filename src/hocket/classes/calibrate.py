"""Scale and shift of every part, fitted on validation data.

Parts are trained apart, so that nothing makes the confidence of one comparable with another's. Two
numbers per part are chosen to give the labels of a validation split the highest likelihood under
the combined scores (Platt scaling, over all parts at once); the problem is convex for one copy per
class. L-BFGS with the exact gradient: O(iterations · inputs · classes).

Then the doubt of classes that fewer parts have answered for: the one with the most right answers
when one or two workers are lost, over the patterns of their loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.classes.combine import Combiner, OddsCalibration, accuracy, log_odds, probabilities

_STRENGTH = 1e-3
"""Pull towards scale 1 and shift 0, which a small validation split needs."""
_DOUBTS = np.arange(11) / 10
_MOST_LOST = 2
_MOST_PATTERNS = 60
_MOST_INPUTS = 5_000
"""That a doubt is chosen by; there are so many answers to each."""


def calibrated(combiner: Combiner, outputs: Sequence[FloatArray], labels: LongArray) -> Combiner:
    """The same parts with scales, shifts and a doubt that fit ``labels``."""
    num_parts = len(outputs)
    odds = [log_odds(output) for output in outputs]
    copies = np.maximum(combiner.copies([True] * num_parts), 1)
    truth = np.eye(combiner.num_classes)[labels]

    def loss(values: FloatArray) -> tuple[float, FloatArray]:
        scales, shifts = values[:num_parts], values[num_parts:]
        now = replace(combiner, calibrations=_as_pairs(scales, shifts))
        scores = now.scores(outputs)
        shares = probabilities(scores)
        likely = np.log(np.maximum(shares[np.arange(len(labels)), labels], 1e-30)).mean()
        slope = (shares - truth) / copies / len(labels)
        gradient = np.zeros(2 * num_parts)
        for part, classes in enumerate(combiner.classes):
            mine = slope[:, list(classes)]
            gradient[part] = (mine * odds[part]).sum()
            gradient[num_parts + part] = mine.sum()
        pull = np.concatenate([scales - 1, shifts])
        return float(-likely + _STRENGTH * (pull**2).sum()), gradient + 2 * _STRENGTH * pull

    start = np.concatenate([np.ones(num_parts), np.zeros(num_parts)])
    bounds = [(0.05, 20.0)] * num_parts + [(-20.0, 20.0)] * num_parts
    from scipy.optimize import minimize

    found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    pairs = _as_pairs(found.x[:num_parts], found.x[num_parts:])
    found_pairs = replace(combiner, calibrations=pairs)
    return replace(found_pairs, doubt=best_doubt(found_pairs, outputs, labels))


def best_doubt(combiner: Combiner, outputs: Sequence[FloatArray], labels: LongArray) -> float:
    """The least doubt with which most inputs are right when few workers are lost."""
    copies = combiner.copies([True] * len(outputs))
    patterns = [
        gone
        for lost in range(1, min(_MOST_LOST, int(copies.min()) - 1) + 1)
        for gone in combinations(range(len(outputs)), lost)
    ]
    if not patterns:
        return 0.0
    chosen = np.linspace(0, len(labels) - 1, min(len(labels), _MOST_INPUTS)).astype(int)
    few, truth = [each[chosen] for each in outputs], labels[chosen]
    right = np.zeros(len(_DOUBTS))
    for place in np.linspace(0, len(patterns) - 1, min(len(patterns), _MOST_PATTERNS)).astype(int):
        has_answered = [index not in patterns[place] for index in range(len(outputs))]
        means = replace(combiner, doubt=0.0).scores(
            [each if came else None for each, came in zip(few, has_answered, strict=True)]
        )
        share = combiner.copies(has_answered) / copies
        right += [accuracy(means * share**doubt, truth) for doubt in _DOUBTS]
    return float(_DOUBTS[right.argmax()])


def _as_pairs(scales: FloatArray, shifts: FloatArray) -> tuple[OddsCalibration, ...]:
    return tuple(
        OddsCalibration(float(scale), float(shift))
        for scale, shift in zip(scales, shifts, strict=True)
    )
