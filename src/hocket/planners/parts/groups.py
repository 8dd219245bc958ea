"""Groups: ops that move together, as numpy and compiled code read them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hocket.base.arrays import IntArray, LongArray, pointers
from hocket.kernels.containers import table


class OpGroups(NamedTuple):
    """Group g has the ops ``ops[ptr[g]:ptr[g + 1]]``, ascending."""

    of: LongArray
    """The group of each op."""
    ptr: LongArray
    ops: LongArray


def groups_of(group_of_op: IntArray) -> OpGroups:
    """Groups from the group of each op, numbered from 0."""
    count = int(group_of_op.max(initial=-1)) + 1
    sizes = np.bincount(group_of_op, minlength=count)
    return OpGroups(
        of=table(group_of_op, np.int64),
        ptr=table(pointers(sizes), np.int64),
        ops=table(np.argsort(group_of_op, kind="stable"), np.int64),
    )
