"""Tiny problems whose memory is so tight that few plans fit: what `optimal` and `auto` find.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/placement/tight_tiny.py [COUNT] [FIRST_SEED]

Graphs of 3 to 12 ops on two or three devices, generated as the tests do it. What exists is what
trying every plan finds (`exact.exhaustive`, which the tests hold against an enumeration of their
own), here with work enough for all of them. Printed per planner: problems in which it finds nothing
although a plan fits, in which it takes over 20 s of CPU, in which its step is longer than the
shortest, and by how much at most.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

import numpy as np
from planners.tight_cases import tight_problem

from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners import find_planner
from hocket.planners.candidates import propose
from hocket.planners.placement.exact import try_all
from hocket.simulate.engine import simulate

NAMES = ("optimal", "auto")
SLOW_S = 20.0
EVERY_RUN = 40_000
"""Enough for all but a few problems, which are counted and left out."""


@dataclass
class Tally:
    """What one planner did."""

    nothing: list[int] = field(default_factory=list)
    slow: list[int] = field(default_factory=list)
    longer: list[tuple[float, int]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def shortest_s(problem: Problem) -> float:
    """Of all plans that fit; infinite where none does, not a number where that is not known."""
    answer = try_all(problem, Plan(), EVERY_RUN)
    if not answer.is_complete:
        return np.nan
    return np.inf if answer.plan is None else simulate(problem, answer.plan).makespan_s


def main() -> None:
    numbers = [int(text) for text in sys.argv[1:]]
    count, first = (*numbers, *(252, 40_000)[len(numbers) :])
    tallies = {name: Tally() for name in NAMES}
    num_feasible = num_unknown = 0
    for seed in range(first, first + count):
        problem = tight_problem(seed, num_ops=3 + seed % 10, num_devices=2 + seed % 2)
        best_s = shortest_s(problem)
        num_feasible += bool(np.isfinite(best_s))
        num_unknown += bool(np.isnan(best_s))
        told = []
        for name, tally in tallies.items():
            started = time.process_time()
            candidate = propose(problem, name, find_planner(name))
            tally.seconds.append(time.process_time() - started)
            if tally.seconds[-1] > SLOW_S:
                tally.slow.append(seed)
            found_s = candidate.step_s
            assert found_s is None or not found_s < best_s * (1 - 1e-8), f"{name} beats {seed}"
            if np.isfinite(best_s) and found_s is None:
                tally.nothing.append(seed)
            elif found_s is not None and found_s > best_s * (1 + 1e-8):
                tally.longer.append((found_s / best_s - 1, seed))
            told.append(f"{name} {found_s} in {tally.seconds[-1]:.1f} s")
        print(f"{seed}: shortest {best_s}; {'; '.join(told)}", file=sys.stderr, flush=True)
    print(
        f"{count} problems from seed {first}, a plan fits in {num_feasible}, unknown "
        f"in {num_unknown}"
    )
    for name, tally in tallies.items():
        most = max(tally.longer, default=(0.0, -1))
        print(
            f"{name}: nothing found though a plan fits {len(tally.nothing)} {tally.nothing[:9]}, "
            f"over {SLOW_S:.0f} s {len(tally.slow)} {tally.slow[:9]}, longer than the shortest "
            f"{len(tally.longer)} (by {most[0]:.1%} at most, seed {most[1]}); "
            f"CPU s: median {np.median(tally.seconds):.2f}, most {max(tally.seconds):.1f}"
        )


if __name__ == "__main__":
    main()
