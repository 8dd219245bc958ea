"""Scale and shift of every part, fitted on validation data.

Parts are trained apart, so that nothing makes the confidence of one comparable with another's. Two
numbers per part are chosen to give the labels of a validation split the highest likelihood under
the combined scores (Platt scaling, over all parts at once); the problem is convex for one copy per
class. L-BFGS with the exact gradient: O(iterations · inputs · classes).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.classes.combine import Combiner, OddsCalibration, log_odds, probabilities

_STRENGTH = 1e-3
"""Pull towards scale 1 and shift 0, which a small validation split needs."""


def calibrated(combiner: Combiner, outputs: Sequence[FloatArray], labels: LongArray) -> Combiner:
    """The same parts with scales and shifts that fit ``labels``."""
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
    return replace(combiner, calibrations=pairs)


def _as_pairs(scales: FloatArray, shifts: FloatArray) -> tuple[OddsCalibration, ...]:
    return tuple(
        OddsCalibration(float(scale), float(shift))
        for scale, shift in zip(scales, shifts, strict=True)
    )
