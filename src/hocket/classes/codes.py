"""Which worker holds which groups so that answers survive lost workers: cyclic codes.

After Yang, Chung, Wang et al., "Robust class parallelism" (Asilomar 2020): worker i holds the
groups i + d modulo n for d in a Golomb ruler, whose pairwise differences are all distinct, so that
two workers never share more than one group. Any r - 1 lost workers lose no group; which losses
beyond that do is counted here, all patterns one by one: O(n choose lost) each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from hocket.base.errors import UsageError

MAX_PATTERNS = 200_000
"""Patterns that are counted for one number of lost workers; beyond it the table ends."""


def ruler(marks: int, modulus: int) -> tuple[int, ...]:
    """The first set of ``marks`` numbers from 0 whose differences modulo ``modulus`` all differ."""
    if marks == 1:
        return (0,)
    found = _extended((0,), frozenset(), marks, modulus)
    if found is None:
        raise UsageError(
            f"{modulus} parts have no code of redundancy {marks}",
            hint=f"{marks} copies whose workers share one group at most need about "
            f"{marks * (marks - 1) + 1} parts or more",
        )
    return found


def _extended(
    marks: tuple[int, ...], taken: frozenset[int], count: int, modulus: int
) -> tuple[int, ...] | None:
    if len(marks) == count:
        return marks
    for mark in range(marks[-1] + 1, modulus):
        gaps = [gap for each in marks for gap in ((mark - each) % modulus, (each - mark) % modulus)]
        # With two marks half of the ring apart a pair would share two groups, unless there are
        # only two workers.
        if len(set(gaps)) < len(gaps) and modulus > 2:
            continue
        if taken & set(gaps):
            continue
        longer = _extended((*marks, mark), taken | set(gaps), count, modulus)
        if longer is not None:
            return longer
    return None


def cyclic_code(num_parts: int, redundancy: int) -> tuple[tuple[int, ...], ...]:
    """The groups that each worker holds, ``redundancy`` copies of each."""
    differences = ruler(redundancy, num_parts)
    return tuple(
        tuple(sorted((worker + d) % num_parts for d in differences)) for worker in range(num_parts)
    )


@dataclass(frozen=True)
class Losses:
    """What becomes of the groups when some workers are lost."""

    lost: int
    patterns: int
    losing: int
    """Patterns in which some group is held by no worker that is left."""
    worst: int
    """Groups that the worst pattern loses."""


def pattern_table(held: Sequence[Sequence[int]], most_lost: int) -> tuple[Losses, ...]:
    """For 1 to ``most_lost`` workers lost: how many patterns lose a group."""
    num_groups = 1 + max(group for groups in held for group in groups)
    masks = np.zeros((len(held), num_groups), dtype=bool)
    for worker, groups in enumerate(held):
        masks[worker, list(groups)] = True
    copies = masks.sum(axis=0)
    rows = []
    for lost in range(1, min(most_lost, len(held) - 1) + 1):
        if comb(len(held), lost) > MAX_PATTERNS:
            break
        chosen = np.array(list(combinations(range(len(held)), lost)))
        gone = (copies == masks[chosen].sum(axis=1)).sum(axis=1)
        rows.append(Losses(lost, len(chosen), int((gone > 0).sum()), int(gone.max())))
    return tuple(rows)
