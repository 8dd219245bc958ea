"""Max-min fairness as a solver of interior points answers it: the lowest job, and no further.

Many allocations have the same lowest job; an interior-point method ends somewhere inside of them
all, and where depends on its path. Gavel takes the answer of ECOS (Domahidi, Chu and Boyd, 2013): a
homogeneous self-dual embedding (Andersen, Roos and Terlaky, 2003) of the program, made even by rows
and columns (Ruiz, 2001). The same path here ends at nearly the same shares, with jobs of a
class as one: O(steps x classes x kinds^3), about ten steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels.containers import table

_EVENING_STEPS = 3


class CentreProgram(NamedTuple):
    """Highest level such that shares are at least 0, progress is at least the level, time at most
    one and devices at most those that there are; every row and column in a unit of its own.

    Order of rows: shares ``[class, kind]``, progress and time by class, devices by kind.
    """

    least: FloatArray
    """``[class, kind]``, as the next three: of a share in its own row, in those of progress, time
    and devices."""
    progress: FloatArray
    time: FloatArray
    devices: FloatArray
    level: FloatArray
    """``[class]``: of the level in the row of progress."""
    limit: FloatArray
    """``[row]``."""
    reward: float
    """Of the level."""
    num_alike: FloatArray
    """``[class]``: jobs."""
    num_rows_alike: FloatArray
    """``[row]``: how many rows of the program of single jobs it represents."""


class Path(NamedTuple):
    """Buffers for a point on the central path and the step from it."""

    by_column: FloatArray
    """``[use, column]``: shares and then the level."""
    by_row: FloatArray
    """``[use, row]``."""
    inverse: FloatArray
    """``[class, kind + 2, kind + 2]``: of the equations of a class for its shares and two duals."""
    block: FloatArray
    """``[kind + 2, 2 (kind + 2)]``: equations of one class, or of what all have in common."""


def central_shares(
    rates: FloatArray, gang: FloatArray, num_devices: LongArray, num_jobs: LongArray
) -> tuple[FloatArray, float]:
    """Shares ``[class, kind]`` of each job inside of all that make the lowest job highest, and how
    high it can be at most."""
    from hocket.fleet.solve.centre_kernel import follow_path

    num_classes, num_kinds = rates.shape
    least, time = -np.ones(rates.shape), np.ones(rates.shape)
    progress, level = -rates, np.ones(num_classes)
    devices = np.repeat(gang[:, None], num_kinds, axis=1).astype(float)
    units = [np.ones(rates.shape), *np.ones((2, num_classes)), np.ones(num_kinds)]
    share_unit, level_unit = np.ones(rates.shape), 1.0
    for _ in range(_EVENING_STEPS):
        rows = [
            np.abs(least),
            np.maximum(np.abs(progress).max(axis=1), level),
            time.max(axis=1),
            devices.max(axis=0),
        ]
        highest = np.maximum(np.abs(least), np.abs(progress))
        column = 1.0 / np.sqrt(np.maximum(highest, np.maximum(time, devices)))
        level_column = float(1.0 / np.sqrt(level.max()))
        row = [1.0 / np.sqrt(one) for one in rows]
        least, progress = least * row[0] * column, progress * row[1][:, None] * column
        time, devices = time * row[2][:, None] * column, devices * row[3] * column
        level = level * row[1] * level_column
        units = [unit * one for unit, one in zip(units, row, strict=True)]
        share_unit, level_unit = share_unit * column, level_unit * level_column
    limit = np.concatenate([np.zeros(rates.size + num_classes), units[2], units[3] * num_devices])
    alike = np.concatenate([np.repeat(num_jobs, num_kinds), num_jobs, num_jobs, np.ones(num_kinds)])
    program = CentreProgram(
        least=table(least, np.float64),
        progress=table(progress, np.float64),
        time=table(time, np.float64),
        devices=table(devices, np.float64),
        level=table(level, np.float64),
        limit=table(limit, np.float64),
        reward=level_unit,
        num_alike=table(num_jobs, np.float64),
        num_rows_alike=table(alike, np.float64),
    )
    size = num_kinds + 2
    path = Path(
        by_column=np.empty((5, num_classes * num_kinds + 1)),
        by_row=np.empty((9, len(alike))),
        inverse=np.empty((num_classes, size, size)),
        block=np.empty((size, 2 * size)),
    )
    scale, bound = follow_path(program, path)
    shares = path.by_column[0, :-1].reshape(num_classes, num_kinds) * share_unit / scale
    return np.clip(shares, 0.0, 1.0), bound
