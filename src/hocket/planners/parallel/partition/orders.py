"""In which order ranks of a pipeline may stand: a graph of ways to have filled the first stages.

With a fixed order there is one way per number of stages. Where ranks of unequal kinds may take any
order, a way is how many of each kind are used: that covers all orders at once, because what is in
flight on a stage depends only on its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from hocket.base.arrays import LongArray
from hocket.base.errors import UsageError
from hocket.kernels.containers import table

_MAX_STEPS = 20_000


class StageWays(NamedTuple):
    """Steps from way to way, each of which adds a stage; way 0 is empty, the last one is full."""

    src: LongArray
    dst: LongArray
    row: LongArray
    """Which stage each step adds."""
    kind: LongArray
    """[row]: device kind of the stage."""
    in_flight: LongArray
    """[row]: microbatches in flight."""
    limit_bytes: LongArray
    """[row]: memory."""

    @property
    def num_ways(self) -> int:
        """Ways to have filled some of the stages."""
        return int(self.dst[-1]) + 1


def fixed_order(kinds: Sequence[int], limits: Sequence[int], in_flight: Sequence[int]) -> StageWays:
    """Stages with the given kinds; ``limits`` has the memory of each kind."""
    steps = np.arange(len(kinds))
    return _order(steps, steps + 1, steps, np.asarray(kinds), np.asarray(in_flight), limits)


def has_few_orders(kinds: Sequence[int]) -> bool:
    """True if `any_order` has room for all orders of these kinds."""
    num_of = [kinds.count(kind) for kind in set(kinds)]
    return prod(num + 1 for num in num_of) * len(num_of) <= _MAX_STEPS


def any_order(kinds: Sequence[int], limits: Sequence[int], in_flight: Sequence[int]) -> StageWays:
    """As many stages of each kind as given, in all orders."""
    present, num_of = np.unique(np.asarray(kinds), return_counts=True)
    if not has_few_orders(kinds):
        raise UsageError(
            f"{len(kinds)} ranks of {len(present)} kinds have too many orders",
            hint="give the order of the kinds, or use fewer pipeline stages",
        )
    grid = sorted(product(*(range(num + 1) for num in num_of)), key=lambda used: (sum(used), used))
    number = {used: index for index, used in enumerate(grid)}
    steps = []
    for used in grid:
        for index in range(len(present)):
            more = (*used[:index], used[index] + 1, *used[index + 1 :])
            if more in number:
                steps.append((number[used], number[more], sum(used) * len(present) + index))
    src, dst, row = np.array(steps).T
    return _order(
        src, dst, row, np.tile(present, len(kinds)), np.repeat(in_flight, len(present)), limits
    )


def _order(
    src: LongArray, dst: LongArray, row: LongArray, kind: LongArray, in_flight: LongArray,
    limits: Sequence[int],
) -> StageWays:  # fmt: skip
    # Stages alike share a row: what they cost is worked out once.
    pairs, same = np.unique(np.stack((kind, in_flight)), axis=1, return_inverse=True)
    return StageWays(
        src=table(src, np.int64),
        dst=table(dst, np.int64),
        row=table(same.ravel()[row], np.int64),
        kind=table(pairs[0], np.int64),
        in_flight=table(pairs[1], np.int64),
        limit_bytes=table(np.asarray(limits)[pairs[0]], np.int64),
    )
