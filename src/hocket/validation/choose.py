"""Which measured runs to calibrate with: few that tell most about the others.

Each run shares with others what predictions leave open, the more the more alike they are
(`hocket.cost.parallel.likeness`). The next run to take is the one that leaves least open in all of
them together (Cohn 1996, active learning for a Gaussian process). Measured times play no part.
O(taken * runs^2) time, O(runs^2) memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.cost.parallel.calibrate import NOISE
from hocket.cost.parallel.likeness import UNEXPLAINED, likeness, places
from hocket.transformer import Divisions
from hocket.validation.rows import Measured

MAX_CALIBRATION_ROWS = 10
_MAX_SHARE = 0.5
"""Of a small table, at least half is kept to be scored."""


def calibration_rows(rows: Sequence[Measured]) -> list[int]:
    """Positions of the runs to calibrate with, in the order in which they were taken."""
    count = min(MAX_CALIBRATION_ROWS, int(len(rows) * _MAX_SHARE))
    return most_telling(alike(rows), [row.table for row in rows], count) if count else []


def alike(rows: Sequence[Measured]) -> FloatArray:
    """[run, run]: how much of what is unexplained two runs share."""
    found = np.concatenate(
        [places(row.model, row.software, Divisions.of([row.division])) for row in rows]
    )
    programs = np.array([row.software.name for row in rows])
    return likeness(found, found, programs[:, None] == programs[None, :])


def most_telling(shared: FloatArray, tables: Sequence[str], count: int) -> list[int]:
    """Positions of up to ``count`` runs, at most half of each table; of equals the first."""
    open_variance = UNEXPLAINED**2 * shared
    left = {table: int(rows * _MAX_SHARE) for table, rows in Counter(tables).items()}
    taken: list[int] = []
    while len(taken) < count:
        noisy = np.diag(open_variance) + NOISE**2
        gain = (open_variance**2).sum(axis=0) / noisy
        gain[[left[table] == 0 for table in tables]] = -1.0
        gain[taken] = -1.0
        best = int(np.argmax(gain))
        if gain[best] < 0:
            break
        taken.append(best)
        left[tables[best]] -= 1
        column = open_variance[:, best]
        open_variance = open_variance - np.outer(column, column) / noisy[best]
    return taken
