"""Forecast the time of an answer before serving, from the measured times of the parts.

With a core for each worker and one for the front end, all parts compute at the same time, and an
answer takes as long as the slowest part plus the fan-out. With fewer cores, parts wait for each
other: they are assigned to cores longest first (Graham 1969), and their workers are pinned there.
O(parts log cores).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from hocket.base.units import format_seconds

_LEAST_S = 1e-9


@dataclass(frozen=True)
class FanOut:
    """Time to send an input to the workers and to collect their answers, without computing."""

    fixed_s: float = 60e-6
    per_worker_s: float = 30e-6
    """Measured without computing: 2 workers take 0.08 to 0.12 ms, 10 take 0.28 to 0.42 ms."""

    def overhead_s(self, num_workers: int) -> float:
        """Fan-out time for a number of workers."""
        return self.fixed_s + self.per_worker_s * num_workers


def answer_s(part_s: Sequence[float], cores: int, fan_out: FanOut) -> float:
    """Predicted time of one answer that needs all parts."""
    return finish_s(part_s, worker_cores(len(part_s), cores)) + fan_out.overhead_s(len(part_s))


def worker_cores(num_workers: int, cores: int) -> int:
    """Number of cores for workers; with more cores than workers, one is left for the front end."""
    return min(num_workers, max(cores - 1, 1)) if cores > num_workers else max(cores, 1)


def places_on(part_s: Sequence[float], cores: int) -> list[int]:
    """Core of each part: parts, longest first, go to the least loaded core."""
    loads = [(0.0, core) for core in range(min(max(cores, 1), max(len(part_s), 1)))]
    places = [0] * len(part_s)
    for part in sorted(range(len(part_s)), key=lambda index: -part_s[index]):
        load_s, places[part] = loads[0]
        # Parts without a measured time are still distributed evenly.
        heapq.heapreplace(loads, (load_s + max(part_s[part], _LEAST_S), places[part]))
    return places


def finish_s(part_s: Sequence[float], cores: int) -> float:
    """Time at which the last core has computed all its parts."""
    loads: dict[int, float] = {}
    for each, core in zip(part_s, places_on(part_s, cores), strict=True):
        loads[core] = loads.get(core, 0.0) + each
    return max(loads.values(), default=0.0)


@dataclass(frozen=True)
class SplitVerdict:
    """Verdict on a split: true if it is faster than the net, with the reason in a sentence."""

    pays: bool
    why: str


def verdict(
    whole_s: float, predicted_s: float, part_macs: Sequence[float], whole_macs: float, cores: int
) -> SplitVerdict:
    """Compare the answer time of a split with that of the unsplit net on one core."""
    speedup = whole_s / predicted_s
    work = sum(part_macs) / whole_macs
    count, overhead_s = len(part_macs), FanOut().overhead_s(len(part_macs))
    detail = (
        f"{count} parts with {max(part_macs) / whole_macs:.2f} of the work each at most "
        f"do {work:.1f}x the work of the whole net"
        if count > 1
        else f"the one part does {work:.2f} of the work of the whole net"
    )
    if speedup > 1.1:
        return SplitVerdict(True, f"an answer comes {speedup:.1f}x sooner; {detail}")
    if whole_s <= overhead_s:
        reason = (
            f"the net is too small: it takes {format_seconds(whole_s)}, and to reach {count} "
            f"worker{'s' * (count > 1)} takes about {format_seconds(overhead_s)}"
        )
    elif cores <= count:
        reason = f"only {cores} cores for {count} workers and the front end"
    else:
        reason = "smaller parts save less time than it takes to reach their workers"
    return SplitVerdict(False, f"splitting does not pay here ({speedup:.2f}x): {reason}; {detail}")
