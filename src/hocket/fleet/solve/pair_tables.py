"""Tables of jobs that may share devices, made in numpy for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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

    Job m has the rows 2m (progress) and 2m + 1 (time), pools follow, and two rows that stand for
    nobody come last: a column of one job has them for its second.
    """

    row_a: ByteArray
    row_b: ByteArray
    row_pool: ByteArray
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
    """``[row, 2]``: the inverted block of each job."""
    border: FloatArray
    """``[row, pool or level]``."""
    corner: FloatArray
    inverse: FloatArray
    """Of the corner."""
    wanted: FloatArray
    found: FloatArray
    work: FloatArray
    """``[vector, row]``."""


def new_guide(num_rows: int, num_pools: int) -> Guide:
    """Room for the guide of a program."""
    size = num_pools + 1
    return Guide(
        diagonal=np.zeros(num_rows),
        block=np.zeros((num_rows, 2)),
        border=np.zeros((num_rows, size)),
        corner=np.zeros((size, size)),
        inverse=np.zeros((size, size)),
        wanted=np.zeros(size),
        found=np.zeros(size),
        work=np.zeros((4, num_rows + 2)),
    )


def new_partners(num_classes: int, count: int) -> Partners:
    """Room for so many partners of each class."""
    return Partners(
        gain=np.full((num_classes, count), -np.inf),
        other=np.zeros((num_classes, count), dtype=np.int64),
    )
