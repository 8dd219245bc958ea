"""Longest paths through ops in topological order whose edges have a length each, compiled.

The edges that begin at op i are ``ptr[i]`` up to ``ptr[i + 1]``; they lead to ``after``.
O(ops + edges).
"""

from __future__ import annotations

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel


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
    """Fill ``from_start_s``, which comes in as zeros: per op, the longest path to its start."""
    for op in range(len(op_s)):
        end_s = from_start_s[op] + op_s[op]
        for edge in range(ptr[op], ptr[op + 1]):
            from_start_s[after[edge]] = max(from_start_s[after[edge]], end_s + edge_s[edge])
