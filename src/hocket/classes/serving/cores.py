"""Which core each worker is pinned to.

Two threads of one physical core slow each other down by a third and more, so workers get physical
cores of their own as long as there are any; where cores are few, the longest parts go to the least
loaded. O(parts log cores).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from hocket.classes.outlook import places_on

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def cores_for(part_s: Sequence[float], given: Sequence[int] | None) -> list[int | None]:
    """A core for each part, from those that are given or else those of this process."""
    count = len(part_s)
    cores = apart(os.sched_getaffinity(0)) if given is None else list(given)
    # The first core is the front end's where there are enough.
    mine = cores[1:] if given is None and len(cores) > count else cores
    if not mine:
        return [None] * count
    return [mine[place] for place in places_on(part_s, len(mine))]


def siblings_of(core: int) -> tuple[int, ...]:
    """The threads of a physical core; the core alone where the system does not tell."""
    try:
        told = Path(_SIBLINGS.format(core)).read_text()
        spans = [list(map(int, span.split("-"))) for span in told.strip().split(",")]
    except (OSError, ValueError):
        return (core,)
    return tuple(each for span in spans for each in range(span[0], span[-1] + 1))


def apart(
    cores: Collection[int], siblings: Callable[[int], tuple[int, ...]] = siblings_of
) -> list[int]:
    """Cores in an order in which those of different physical cores come first."""

    def rank(core: int) -> tuple[int, int]:
        return sum(each < core and each in cores for each in siblings(core)), core

    return sorted(cores, key=rank)
