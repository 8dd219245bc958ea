"""Reads the CSV files of torch.distributed.pipelining back: the inverse of `to_torch_csv`."""

import csv
import io
import re

import numpy as np

from hocket.base.arrays import pointers
from hocket.plan.sections.schedule import LETTERS, Schedule
from hocket.simulate.pipeline import verify_schedule

_CELL = re.compile(r"([0-9]+)([FBIW])([0-9]+)")


def from_torch_csv(text, name="torch"):
    """The verified schedule; pairs that torch overlaps become their parts in order."""
    rows = [_CELL.findall(",".join(row)) for row in csv.reader(io.StringIO(text))]
    flat = np.array(
        [(LETTERS.index(work), stage, number) for row in rows for stage, work, number in row],
        dtype=np.int32,
    )
    device_of = {int(stage): rank for rank, row in enumerate(rows) for stage, _, _ in row}
    schedule = Schedule(
        name=name,
        num_microbatches=int(flat[:, 2].max()) + 1,
        device_of_stage=np.array([device_of[stage] for stage in sorted(device_of)], np.int32),
        start=pointers([len(row) for row in rows]).astype(np.int32),
        work=flat[:, 0].copy(),
        stage=flat[:, 1].copy(),
        microbatch=flat[:, 2].copy(),
    )
    verify_schedule(schedule)
    return schedule
