"""Memory overheads of a device beyond the formulas, and their fit to measured peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class MemoryOverheads:
    """Memory beyond the formulas: libraries, communication buffers, fragmentation."""

    constant_bytes: float = 4e9
    state_factor: float = 1.15
    activation_factor: float = 1.15


FORMULAS_ONLY = MemoryOverheads(constant_bytes=0.0, state_factor=1.0, activation_factor=1.0)
"""No overheads, as papers count memory."""
DEFAULT_OVERHEADS = MemoryOverheads()
"""Overheads that are assumed if none were measured."""
GIVEN_BACK = 1.05
"""Largest ratio of predicted peak and device memory at which a run still fits. The driver reports
more than is needed: PyTorch's caching allocator frees cached blocks before it runs out of
memory."""

_LEAST = (0.0, 1.0, 1.0)
"""Smallest fitted values: overheads never reduce the formulas' bytes."""
_MOST = (16e9, 2.0, 2.0)
_SPREAD = (2e9, 0.1, 0.1)
"""Prior standard deviation of each overhead between programs."""
_NOISE = 0.05
_OUTLIER = 1.5
"""Multiple of the noise beyond which a measured peak loses weight."""
_NUM_ROUNDS = 12


def fit_overheads(
    state_bytes: Sequence[float],
    activation_bytes: Sequence[float],
    measured_bytes: Sequence[float],
    expected: MemoryOverheads = DEFAULT_OVERHEADS,
) -> MemoryOverheads:
    """Fit overheads to measured peaks, with a weak prior at the ``expected`` values.

    Solves least squares of the relative errors within plausible bounds. Peaks that no overheads
    explain lose weight the further off they are.
    """
    from scipy.optimize import lsq_linear

    measured = np.asarray(measured_bytes, dtype=np.float64)
    # Columns differ by ten orders of magnitude, so they are scaled to values near one for the
    # solver.
    scale = np.asarray(_SPREAD)
    rows = np.column_stack([np.ones_like(measured), state_bytes, activation_bytes])
    rows = rows / measured[:, None] * scale / _NOISE
    prior = (expected.constant_bytes, expected.state_factor, expected.activation_factor)
    bounds = (np.divide(_LEAST, scale), np.divide(_MOST, scale))
    solution = np.divide(prior, scale)
    for _ in range(_NUM_ROUNDS):
        off = (rows @ solution - 1 / _NOISE) / _OUTLIER
        # Soft L1 weights, applied to both sides of the equation.
        weight = (1 + off**2) ** -0.25
        matrix = np.vstack([rows * weight[:, None], np.eye(len(scale))])
        target = np.concatenate([weight / _NOISE, np.divide(prior, scale)])
        solution = lsq_linear(matrix, target, bounds).x
    constant, state, activation = (float(value) for value in solution * scale)
    return MemoryOverheads(
        constant_bytes=constant, state_factor=state, activation_factor=activation
    )
