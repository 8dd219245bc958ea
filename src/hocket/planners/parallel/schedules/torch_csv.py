"""Write schedules as the CSV files of torch.distributed.pipelining.

There is one line per rank and one cell per action: ``0F0`` is the forward of stage 0 for microbatch
0, B a full backward, I and W its halves for inputs and weights. Only computations are written
(torch's format ``compute_only``), since torch adds the transfers itself. O(actions).
"""

from __future__ import annotations

from itertools import pairwise

from hocket.plan.sections.schedule import LETTERS, Schedule


def to_torch_csv(schedule: Schedule) -> str:
    """Text of the CSV file, one line per device."""
    columns = (schedule.stage.tolist(), schedule.work.tolist(), schedule.microbatch.tolist())
    cells = [
        f"{stage}{LETTERS[work]}{microbatch}"
        for stage, work, microbatch in zip(*columns, strict=True)
    ]
    start = schedule.start.tolist()
    rows = (cells[first:stop] for first, stop in pairwise(start))
    return "".join(",".join(row) + "\n" for row in rows)
