"""Memory overheads of a device beyond the formulas, and their fit to measured peaks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hocket.base.arrays import FloatArray


@dataclass(frozen=True, kw_only=True)
class MemoryOverheads:
    """Libraries, communication buffers, buckets and fragmentation, around the formulas."""

    constant_bytes: float = 4e9
    state_factor: float = 1.15
    activation_factor: float = 1.15

    def total(self, state_bytes: FloatArray, activation_bytes: FloatArray) -> FloatArray:
        """Bytes that the driver shows."""
        return (
            self.constant_bytes
            + self.state_factor * state_bytes
            + self.activation_factor * activation_bytes
        )


FORMULAS_ONLY = MemoryOverheads(constant_bytes=0.0, state_factor=1.0, activation_factor=1.0)
"""Nothing beyond the formulas, as papers count memory."""
DEFAULT_OVERHEADS = MemoryOverheads()
"""Overheads without measurements."""
GIVEN_BACK = 1.05
"""Memory that the driver shows, relative to the memory needed: PyTorch's caching allocator frees
its cached blocks before it fails. A run fits unless its peak exceeds the memory by more."""

_LEAST = (0.0, 1.0, 1.0)
"""Nothing shrinks what the formulas count."""
_MOST = (16e9, 2.0, 2.0)
_SPREAD = (2e9, 0.1, 0.1)
"""Spread between programs: the fit departs from the expected values only as far as rows require."""
_NOISE = 0.05
_OUTLIER = 1.5
"""Multiple of the noise beyond which a row counts less."""
_NUM_ROUNDS = 12


def fit_overheads(
    state_bytes: Sequence[float],
    activation_bytes: Sequence[float],
    measured_bytes: Sequence[float],
    expected: MemoryOverheads = DEFAULT_OVERHEADS,
) -> MemoryOverheads:
    """Overheads that meet the measured peaks best, held to what is expected where rows say little.

    Least squares of relative errors with a weak prior, bounded to believable values; rows that no
    overheads explain count less the further off they are.
    """
    from scipy.optimize import lsq_linear

    measured = np.asarray(measured_bytes, dtype=np.float64)
    # Columns differ by ten orders of magnitude: the solver is given figures near one.
    scale = np.asarray(_SPREAD)
    rows = np.column_stack([np.ones_like(measured), state_bytes, activation_bytes])
    rows = rows / measured[:, None] * scale / _NOISE
    prior = (expected.constant_bytes, expected.state_factor, expected.activation_factor)
    bounds = (np.divide(_LEAST, scale), np.divide(_MOST, scale))
    solution = np.divide(prior, scale)
    for _ in range(_NUM_ROUNDS):
        off = (rows @ solution - 1 / _NOISE) / _OUTLIER
        weight = (1 + off**2) ** -0.25
        matrix = np.vstack([rows * weight[:, None], np.eye(len(scale))])
        target = np.concatenate([weight / _NOISE, np.divide(prior, scale)])
        solution = lsq_linear(matrix, target, bounds).x
    constant, state, activation = (float(value) for value in solution * scale)
    return MemoryOverheads(
        constant_bytes=constant, state_factor=state, activation_factor=activation
    )
