"""Schedules as the CSV files of torch.distributed.pipelining.

One line per rank, one cell per action: ``0F0`` is the forward of stage 0 for microbatch 0, B a
full backward, I and W its halves for inputs and weights. Only computations are written (torch's
format ``compute_only``): torch adds the transfers itself. O(actions).
"""

from __future__ import annotations

import csv
import io
import re
from itertools import pairwise

import numpy as np

from hocket.base.arrays import pointers
from hocket.base.errors import InputFileError
from hocket.plan.sections.schedule import Schedule
from hocket.planners.parallel.schedules.verify import verify_schedule
from hocket.simulate.pipeline import WORK_LETTERS

_CELL = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_Action = tuple[int, int, int]
"""Work, stage and microbatch."""


def to_torch_csv(schedule: Schedule) -> str:
    """The text of the file, one line per device."""
    columns = (schedule.stage.tolist(), schedule.work.tolist(), schedule.microbatch.tolist())
    cells = [
        f"{stage}{WORK_LETTERS[work]}{microbatch}"
        for stage, work, microbatch in zip(*columns, strict=True)
    ]
    start = schedule.start.tolist()
    rows = (cells[first:stop] for first, stop in pairwise(start))
    return "".join(",".join(row) + "\n" for row in rows)


def from_torch_csv(text: str, *, name: str = "torch") -> Schedule:
    """The schedule of a file, which may have empty cells and overlapped pairs, and is verified.

    A pair that torch overlaps (``(0F3;7B0)OVERLAP_F_B``) becomes its parts in their order.
    """
    rows = [
        [action for cell in row for action in _actions(cell.strip(), rank)]
        for rank, row in enumerate(csv.reader(io.StringIO(text)))
    ]
    flat = np.array([action for row in rows for action in row], dtype=np.int32).reshape(-1, 3)
    if not len(flat):
        raise InputFileError("the file has no actions", hint="cells look like '0F0'", where=name)
    sizes = [len(row) for row in rows]
    schedule = Schedule(
        name=name,
        num_microbatches=int(flat[:, 2].max()) + 1,
        device_of_stage=_devices(rows, name),
        start=pointers(sizes).astype(np.int32),
        work=flat[:, 0].copy(),
        stage=flat[:, 1].copy(),
        microbatch=flat[:, 2].copy(),
    )
    verify_schedule(schedule)
    return schedule


def _actions(cell: str, rank: int) -> list[_Action]:
    pair = _PAIR.fullmatch(cell)
    parts = pair[1].split(";") if pair else [cell] if cell else []
    return [_action(part.strip(), rank) for part in parts]


def _action(cell: str, rank: int) -> _Action:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise InputFileError(
            f"cell {cell[:40]!r} is no computation",
            hint="cells look like '0F0', '2B1', '5I3' or '5W3'; leave out transfers",
            where=f"line {rank + 1}",
        )
    return WORK_LETTERS.index(match[2]), int(match[1]), int(match[3])


def _devices(rows: list[list[_Action]], name: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The device of each stage; every stage below the last must be on one."""
    device_of: dict[int, int] = {}
    for device, row in enumerate(rows):
        for _, stage, _ in row:
            if device_of.setdefault(stage, device) != device:
                raise InputFileError(
                    f"stage {stage} is on rank {device_of[stage]} and on rank {device}",
                    hint="give each stage to one rank",
                    where=name,
                )
    if sorted(device_of) != list(range(len(device_of))):
        missing = next(stage for stage in range(len(device_of)) if stage not in device_of)
        raise InputFileError(f"stage {missing} has no actions", where=name)
    return np.array([device_of[stage] for stage in range(len(device_of))], dtype=np.int32)
