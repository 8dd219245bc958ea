"""Building blocks of all schedules: stage layouts, and rows of actions in order.

A row lists the actions of one device. Schedules with a fixed rhythm (a forward, a backward, perhaps
a weight gradient per round) differ in how many forwards come first and how late weight gradients
come, so `rounds` makes all of them, as arrays over devices. Other schedules provide the pattern of
each row, and `numbered` adds the microbatches. O(actions), except for sorting rows that are already
merged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import IntArray, pointers
from hocket.plan.sections.schedule import Schedule, StageWork, round_order

Row = NDArray[np.int64]
"""Codes of one device's actions; see `code`."""


def code(work: StageWork, chunk: int) -> int:
    """Encode an action without its microbatch as one number."""
    # `StageWork` has at most four values, so chunk and work share one number.
    return chunk * 4 + work


def looped(num_devices: int, chunks: int) -> IntArray:
    """Device of each stage if the model goes round all devices ``chunks`` times."""
    return np.tile(np.arange(num_devices, dtype=np.int32), chunks)


def folded(num_devices: int) -> IntArray:
    """Device of each stage if the model goes to the last device and back, as a V."""
    there = np.arange(num_devices, dtype=np.int32)
    return np.concatenate([there, there[::-1]])


def stages_of_chunks(device_of_stage: IntArray, num_devices: int) -> NDArray[np.int64]:
    """[device, chunk]: stages of each device in model order."""
    order = np.argsort(device_of_stage, kind="stable")
    return order.reshape(num_devices, -1)


def rounds(
    name: str,
    num_devices: int,
    num_microbatches: int,
    groups: Sequence[int],
    *,
    chunks: int,
    warm_up: NDArray[np.int64],
    weight_lag: NDArray[np.int64] | None = None,
) -> Schedule:
    """Schedule of looped stages: ``warm_up`` forwards per device, then forward and backward in
    turn.

    Microbatches run in groups: each group passes a device's first chunk, then the next one. With
    ``weight_lag``, backwards are split, and the weight gradient comes that many rounds later.
    """
    chunk, microbatch = _forward_order(groups, chunks)
    count = len(chunk)
    works = [StageWork.FORWARD, StageWork.BACKWARD]
    if weight_lag is not None:
        works = [StageWork.FORWARD, StageWork.INPUT_GRADIENT, StageWork.WEIGHT_GRADIENT]
    order = round_order(count, warm_up, weight_lag)
    # Backwards visit the chunks in reverse order.
    back = chunks - 1 - chunk
    all_chunks = np.concatenate([chunk, *([back] * (len(works) - 1))])[order]
    layout = looped(num_devices, chunks)
    stage = all_chunks * num_devices + np.arange(num_devices)[:, None]
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        device_of_stage=layout,
        start=(np.arange(num_devices + 1) * order.shape[1]).astype(np.int32),
        work=np.repeat(np.array(works, dtype=np.int32), count)[order].ravel(),
        stage=stage.astype(np.int32).ravel(),
        microbatch=np.tile(microbatch, len(works))[order].astype(np.int32).ravel(),
    )


def _forward_order(
    groups: Sequence[int], chunks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Chunk and microbatch of each forward of a device, in order; backwards mirror the chunks."""
    chunk, microbatch, first = [], [], 0
    for size in groups:
        chunk.append(np.repeat(np.arange(chunks), size))
        microbatch.append(np.tile(np.arange(first, first + size), chunks))
        first += size
    return np.concatenate(chunk), np.concatenate(microbatch)


def from_rows(
    name: str, num_microbatches: int, device_of_stage: IntArray, rows: Sequence[Row]
) -> Schedule:
    """Make a schedule from one row of codes per device; extra microbatches are left out."""
    stages = stages_of_chunks(device_of_stage, len(rows))
    parts = []
    for row, own in zip(rows, stages, strict=True):
        microbatch = numbered(row)
        kept = microbatch < num_microbatches
        parts.append((row[kept] % 4, own[row[kept] // 4], microbatch[kept]))
    work, stage, microbatch = (np.concatenate(part) for part in zip(*parts, strict=True))
    sizes = [len(part[0]) for part in parts]
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        device_of_stage=device_of_stage,
        start=pointers(sizes).astype(np.int32),
        work=work.astype(np.int32),
        stage=stage.astype(np.int32),
        microbatch=microbatch.astype(np.int32),
    )


def numbered(row: Row) -> Row:
    """Microbatch of each action of a row: every chunk processes them in order.

    Full backwards and input gradients are numbered together. A weight gradient belongs to the
    earliest input gradient of its chunk that has none yet.
    """
    work, chunk = row % 4, row // 4
    microbatch = np.zeros(len(row), dtype=np.int64)
    for own in range(int(chunk.max(initial=0)) + 1):
        is_own = chunk == own
        for is_kind in (work == StageWork.FORWARD, (work == StageWork.BACKWARD) | (work == 2)):
            at = np.flatnonzero(is_own & is_kind)
            microbatch[at] = np.arange(len(at))
        split = np.flatnonzero(is_own & (work == StageWork.INPUT_GRADIENT))
        microbatch[is_own & (work == StageWork.WEIGHT_GRADIENT)] = microbatch[split]
    return microbatch
