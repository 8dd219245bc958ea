"""Assign groups of classes to workers by cyclic codes, so that lost workers lose no answer.

After Yang, Chung, Wang et al., "Robust class parallelism" (Asilomar 2020): worker i holds the
groups i + d modulo n for every d in a Golomb ruler. The pairwise differences of a ruler are all
distinct, so two workers share at most one group. If there are too many copies for that, differences
repeat as seldom as possible. Any r - 1 lost workers lose no group. Losses beyond that are counted
over all patterns, O(n choose lost) each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np

from hocket.base.errors import UsageError

MAX_PATTERNS = 200_000
"""Maximum number of patterns per number of lost workers; the table ends before a number with more.
"""


_MAX_TRIES = 20_000
"""Maximum number of marks tried in the search for one code; after that, differences may repeat once
more.
"""


def ruler(marks: int, modulus: int) -> tuple[int, ...]:
    """``marks`` numbers, 0 first, whose differences modulo ``modulus`` repeat as seldom as
    possible.
    """
    if marks > modulus:
        raise UsageError(
            f"{modulus} parts have no code of redundancy {marks}",
            hint="every copy of a class needs a part of its own: take more --parts",
        )
    # Pigeonhole bound: marks * (marks - 1) ordered differences fall on modulus - 1 values.
    least = -(-marks * (marks - 1) // max(modulus - 1, 1))
    for most in range(max(least, 1), marks + 1):
        found = _RulerSearch(marks, modulus, most).extended((0,), Counter())
        if found is not None:
            return found
    raise AssertionError("marks in a row repeat no difference more often than there are marks")


class _RulerSearch:
    """Depth-first search for marks with no difference more than ``most`` times."""

    def __init__(self, marks: int, modulus: int, most: int) -> None:
        self._marks, self._modulus, self._most = marks, modulus, most
        self._tries = 0

    def extended(self, marks: tuple[int, ...], gaps: Counter[int]) -> tuple[int, ...] | None:
        """Extend ``marks`` to a complete ruler; None if there is none or the tries are used up."""
        if len(marks) == self._marks:
            return marks
        for mark in range(marks[-1] + 1, self._modulus):
            self._tries += 1
            if self._tries > _MAX_TRIES:
                return None
            longer = gaps.copy()
            for each in marks:
                # Both directions, because workers are arranged in a circle.
                longer[(mark - each) % self._modulus] += 1
                longer[(each - mark) % self._modulus] += 1
            # A difference d that occurs k times makes workers at distance d share k groups.
            if max(longer.values()) <= self._most:
                found = self.extended((*marks, mark), longer)
                if found is not None:
                    return found
        return None


def cyclic_code(num_parts: int, redundancy: int) -> tuple[tuple[int, ...], ...]:
    """Groups held by each worker, with ``redundancy`` copies of each group."""
    differences = ruler(redundancy, num_parts)
    return tuple(
        tuple(sorted((worker + d) % num_parts for d in differences)) for worker in range(num_parts)
    )


def held_classes(
    groups: Sequence[Sequence[int]], held: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Classes held by each worker, from the groups that it holds."""
    return [tuple(sorted(each for group in mine for each in groups[group])) for mine in held]


@dataclass(frozen=True)
class Losses:
    """Number of loss patterns that lose a group, for one number of lost workers."""

    lost: int
    patterns: int
    losing: int
    """Number of patterns in which some group is held by no remaining worker."""
    worst: int
    """Number of groups that the worst pattern loses."""


def pattern_table(held: Sequence[Sequence[int]], most_lost: int) -> tuple[Losses, ...]:
    """Number of patterns that lose a group, for 1 to ``most_lost`` lost workers."""
    num_groups = 1 + max(group for groups in held for group in groups)
    masks = np.zeros((len(held), num_groups), dtype=bool)
    for worker, groups in enumerate(held):
        masks[worker, list(groups)] = True
    copies = masks.sum(axis=0)
    rows = []
    for lost in range(1, min(most_lost, len(held) - 1) + 1):
        # More patterns than can be enumerated; larger numbers of lost workers have more, up to half
        # of all.
        if comb(len(held), lost) > MAX_PATTERNS:
            break
        chosen = np.array(list(combinations(range(len(held)), lost)))
        gone = (copies == masks[chosen].sum(axis=1)).sum(axis=1)
        rows.append(Losses(lost, len(chosen), int((gone > 0).sum()), int(gone.max())))
    return tuple(rows)
