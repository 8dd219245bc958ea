"""Which rows of a batch each microbatch takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Rows(NamedTuple):
    """The rows of a batch that one microbatch takes."""

    start: int
    stop: int


def rows_of_replicas(replicas: Sequence[Sequence[int]]) -> tuple[tuple[Rows, ...], ...]:
    """The rows of each microbatch of each replica, in order, from their sizes."""
    found, start = [], 0
    for sizes in replicas:
        own = []
        for size in sizes:
            own.append(Rows(start, start + size))
            start += size
        found.append(tuple(own))
    return tuple(found)
