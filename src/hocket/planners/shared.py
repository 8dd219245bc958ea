"""Definitions shared by all planners: the `Planner` type, op groups, longest paths."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray, pointers
from hocket.kernels import kernel
from hocket.kernels.containers import table
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem

# Large graphs: planning or simulating them once more takes long.

_LARGE_OPS = 50_000


def is_large(num_ops: int) -> bool:
    """True if planners should try only one plan, one order or few rounds to save time."""
    return num_ops > _LARGE_OPS


# Results that are computed once for each problem.

_Made = TypeVar("_Made")


def once_per_problem(make: Callable[[Problem], _Made]) -> Callable[[Problem], _Made]:
    """Cache a function's result as long as its problem exists, since portfolios reuse it."""
    # Weak keys: cached tables must not keep a large problem alive.
    known: WeakKeyDictionary[Problem, _Made] = WeakKeyDictionary()

    @wraps(make)
    def once(problem: Problem) -> _Made:
        if problem not in known:
            known[problem] = make(problem)
        return known[problem]

    return once


# Groups: ops that move together, as numpy and compiled code read them.


class OpGroups(NamedTuple):
    """Ops by group: those of group g are ``ops[ptr[g]:ptr[g + 1]]``, ascending."""

    of: LongArray
    """Per op: its group."""
    ptr: LongArray
    ops: LongArray


def groups_of(group_of_op: IntArray) -> OpGroups:
    """Build groups from the group of each op, numbered from 0."""
    count = int(group_of_op.max(initial=-1)) + 1
    sizes = np.bincount(group_of_op, minlength=count)
    return OpGroups(
        of=table(group_of_op, np.int64),
        ptr=table(pointers(sizes), np.int64),
        ops=table(np.argsort(group_of_op, kind="stable"), np.int64),
    )


# Longest paths through ops in topological order whose edges have a length each, compiled.
#
# The edges that begin at op i are ``ptr[i]`` up to ``ptr[i + 1]``; they lead to ``after``.
# O(ops + edges).


@kernel
def longest_to_end(
    ptr: LongArray, after: LongArray, edge_s: FloatArray, op_s: FloatArray, to_end_s: FloatArray
) -> None:
    """Fill ``to_end_s``: per op, the longest path from its start to the end."""
    for op in range(len(op_s) - 1, -1, -1):
        rest_s = 0.0
        for edge in range(ptr[op], ptr[op + 1]):
            rest_s = max(rest_s, to_end_s[after[edge]] + edge_s[edge])
        to_end_s[op] = rest_s + op_s[op]


@kernel
def longest_from_start(
    ptr: LongArray, after: LongArray, edge_s: FloatArray, op_s: FloatArray, from_start_s: FloatArray
) -> None:
    """Fill ``from_start_s``, initially zeros: per op, the longest path to its start."""
    # Ops are in topological order, so each start is final when its op is reached.
    for op in range(len(op_s)):
        end_s = from_start_s[op] + op_s[op]
        for edge in range(ptr[op], ptr[op + 1]):
            from_start_s[after[edge]] = max(from_start_s[after[edge]], end_s + edge_s[edge])


Planner = Callable[[Problem, Plan], Plan]
"""A pure function: the same problem and plan give the same plan, byte for byte."""
