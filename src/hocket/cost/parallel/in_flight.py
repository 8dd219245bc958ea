"""Number of microbatches that a pipeline rank holds at once, by schedule.

The unit is a chunk: one microbatch on one of the rank's virtual stages. The counts are those of
each schedule's warm-up if there are enough microbatches; otherwise all microbatches are held.
"""

from __future__ import annotations

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.transformer import SCHEDULES, ScheduleName
from hocket.transformer.parallel_config import FOLDED, SPLIT

SPLITS_BACKWARD = np.array([name in SPLIT for name in SCHEDULES])
"""True for schedules with a split backward (zero bubble)."""
V_SHAPED = np.array([name in FOLDED for name in SCHEDULES])
"""True for schedules that place the first and the last stage on one rank."""


def in_flight_chunks(
    schedule: ScheduleName, pipeline: FloatArray, chunks: FloatArray, rank: FloatArray
) -> FloatArray:
    """Largest number of chunks that a pipeline rank holds at once, given enough microbatches."""
    after = pipeline - 1 - rank
    if schedule in ("gpipe", "looped-bfs"):
        # All microbatches are held; callers take the minimum with their number.
        return np.full(np.broadcast(pipeline, chunks, rank).shape, np.inf)
    if schedule in ("1f1b", "interleaved"):
        # With one chunk, interleaving is plain 1F1B; with more, a rank runs one more round ahead.
        return np.where(chunks > 1, (chunks - 1) * pipeline + 2 * after + 1, after + 1)
    held = {
        "zb-h1": pipeline,
        "zb-h2": 2 * pipeline - 1,
        "zb-v": 2 * pipeline,
        "dualpipe-v": 2 * pipeline + 1,
    }[schedule]
    # Adding zeros broadcasts the result to the shape of all arguments.
    return held + 0 * (chunks + rank)
