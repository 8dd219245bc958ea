"""Tables of jobs that may share devices, made in numpy for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import FloatArray, LongArray


class ClassPairTable(NamedTuple):
    """Progress of classes beside each other, as the snapshot has it: nothing is copied."""

    steps_per_s: FloatArray
    """``[profile, profile, column]``."""
    profile_of: LongArray
    """The profile of each class."""
    unit: FloatArray
    """``[class]``: progress of a step."""
    alone: FloatArray
    """``[class, column]``: progress of a job that has its devices alone."""
    gang: FloatArray
    num_jobs: FloatArray


class Partners(NamedTuple):
    """Result of a look at all pairs."""

    most: FloatArray
    """``[class]``: what its best pair gains; minus infinity where it has none."""
    gain: FloatArray
    """``[class, place]``: of the partners in the list, shaken, best first; minus infinity where
    there is none."""
    other: LongArray
    column: LongArray


class Anchors(NamedTuple):
    """Some classes whose duals are known, as partners for others."""

    one: LongArray
    """The class."""
    value: FloatArray
    """Worth of a step."""
    spent: FloatArray
    """``[anchor, column]``: its rent and what its devices cost, infinite where it cannot run."""


class ShareColumns(NamedTuple):
    """Columns of the program: one job, or two, on devices of a pool.

    Rows are the progress of jobs, then their time, then pools. ``num_rows`` stands for nobody: it
    is the second job of a column that has one only, and rows are kept long enough for it.
    """

    job_a: NDArray[np.uint32]
    job_b: NDArray[np.uint32]
    pool: NDArray[np.uint32]
    rate_a: FloatArray
    """Progress of the first job, in the unit of its row."""
    rate_b: FloatArray
    devices: FloatArray
    """Devices of the pool that are held."""


class Preconditioner(NamedTuple):
    """An approximate inverse of the matrix of a step, and scratch of conjugate gradients."""

    diagonal: FloatArray
    """``[row]``: what slack adds to the matrix."""
    block: FloatArray
    """``[job, 3]``: the inverted block of each job: progress, both, time."""
    border: FloatArray
    """``[pool or level, row of a job]``."""
    inner: FloatArray
    """The same times the inverse of the blocks."""
    corner: FloatArray
    inverse: FloatArray
    """Of the corner."""
    wanted: FloatArray
    work: FloatArray
    """``[vector, row]``."""


def new_guide(num_jobs: int, num_pools: int) -> Preconditioner:
    """An empty preconditioner for a program."""
    size = num_pools + 1
    return Preconditioner(
        diagonal=np.zeros(2 * num_jobs + num_pools),
        block=np.zeros((num_jobs, 3)),
        border=np.zeros((size, 2 * num_jobs)),
        inner=np.zeros((size, 2 * num_jobs)),
        corner=np.zeros((size, size)),
        inverse=np.zeros((size, size)),
        wanted=np.zeros(size),
        work=np.zeros((4, padded(num_jobs, num_pools))),
    )


def padded(num_jobs: int, num_pools: int) -> int:
    """Length of a vector of rows, including the row that stands for nobody."""
    return 3 * num_jobs + num_pools + 1


def new_partners(num_classes: int, count: int) -> Partners:
    """Empty table of ``count`` partners of each class."""
    return Partners(
        most=np.full(num_classes, -np.inf),
        gain=np.full((num_classes, count), -np.inf),
        other=np.zeros((num_classes, count), dtype=np.int64),
        column=np.zeros((num_classes, count), dtype=np.int64),
    )
