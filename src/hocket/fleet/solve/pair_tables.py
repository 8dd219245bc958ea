"""Tables of jobs that may share devices, made in numpy for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.arrays import ByteArray, FloatArray


class PairTable(NamedTuple):
    """What classes do beside each other, as the market has it: nothing is copied."""

    steps_per_s: FloatArray
    """``[profile, profile, column]``."""
    profile_of: ByteArray
    """The profile of each class."""
    unit: FloatArray
    """``[class]``: progress of a step."""
    alone: FloatArray
    """``[class, column]``: progress of a job that has its devices alone."""
    gang: FloatArray
    num_jobs: FloatArray


class Partners(NamedTuple):
    """The partners that gain most, best first."""

    gain: FloatArray
    """``[class, place]``: minus infinity where there is none."""
    other: ByteArray


class Columns(NamedTuple):
    """Ways to spend time: one job, or two, on devices of a pool.

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


class Guide(NamedTuple):
    """An approximate inverse of the matrix of a step, and room for conjugate gradients."""

    diagonal: FloatArray
    """``[row]``: what slack adds to the matrix."""
    block: FloatArray
    """``[job, 3]``: the inverted block of each job: progress, both, time."""
    border: FloatArray
    """``[job, progress or time, pool or level]``."""
    corner: FloatArray
    inverse: FloatArray
    """Of the corner."""
    wanted: FloatArray
    found: FloatArray
    work: FloatArray
    """``[vector, row]``."""


def new_guide(num_jobs: int, num_pools: int) -> Guide:
    """Room for the guide of a program."""
    size = num_pools + 1
    return Guide(
        diagonal=np.zeros(2 * num_jobs + num_pools),
        block=np.zeros((num_jobs, 3)),
        border=np.zeros((num_jobs, 2, size)),
        corner=np.zeros((size, size)),
        inverse=np.zeros((size, size)),
        wanted=np.zeros(size),
        found=np.zeros(size),
        work=np.zeros((4, padded(num_jobs, num_pools))),
    )


def padded(num_jobs: int, num_pools: int) -> int:
    """Length of a vector of rows that has room for nobody."""
    return 3 * num_jobs + num_pools + 1


def new_partners(num_classes: int, count: int) -> Partners:
    """Room for so many partners of each class."""
    return Partners(
        gain=np.full((num_classes, count), -np.inf),
        other=np.zeros((num_classes, count), dtype=np.int64),
    )
