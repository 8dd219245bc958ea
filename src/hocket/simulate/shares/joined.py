"""Parts of divided matrices while they are unfolded: what they make is summed where it leaves them.

All devices of a group have the same samples and a part of every divided op each; a sum begins when
all of them have what is added, and what reads it waits. O(sums x devices).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hocket.graph.graph import Role
from hocket.plan.problem import Problem
from hocket.simulate.shares.copies import ReplicaCopy
from hocket.simulate.shares.matrices import Regions
from hocket.simulate.shares.prices import priced_at
from hocket.simulate.shares.sharded import together
from hocket.simulate.shares.sheet import Sheet


def join_parts(
    problem: Problem, regions: Regions, copies: Sequence[ReplicaCopy], degree: int, sheet: Sheet
) -> None:
    """Add the sums over the parts of every group; copies stand group by group."""
    for start in range(0, len(copies), degree):
        group = copies[start : start + degree]
        for number, size in enumerate(group[0].replica.microbatches):
            sized = priced_at(problem, size).graph
            for index, (makers, readers, tensor) in enumerate(regions.sums):
                made = np.concatenate([np.array(sized.made_by(int(op))) for op in makers])
                one = group[0].passes[number]
                ops = together(
                    problem, group, sheet, f"sum.{index}#{number}", int(sized.tensor_bytes[tensor]),
                    float(one.priority[makers].max()) + 0.25,
                    [own.passes[number].tensor[made] for own in group],
                    num_halves=2,
                )  # fmt: skip
                names = [f"sum.{index}#{number}{own.label}#done" for own in group]
                told = sheet.add_tensors(names, role=Role.CONTROL, producer=ops)
                for own, done in zip(group, told, strict=True):
                    waiting = own.passes[number].op[readers]
                    sheet.add_reads(waiting, np.full(len(waiting), done))
