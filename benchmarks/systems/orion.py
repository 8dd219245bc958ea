"""Orion's row: matrix factorisation on two threads, and sixty loops beside bounds-checked numba.

Run: python benchmarks/systems/orion.py [--ratings 100000] [--repeats 5] [--quick]

Measured on this machine. Ratios of two threads to one need two free cores; times over numba are CPU
times on one core, which bear a busy machine (benchmarks/loops/kernels.py prints every loop).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "loops"))
from fresh_loops import FRESH
from kernels import mean, row
from matrix_factorisation import data, sgd, start, with_workers


def factorisation(num_ratings: int, repeats: int) -> tuple[float, float]:
    """How often faster two threads are than one, and than plain Python (per rating)."""
    u, i, v = data(num_ratings)
    few = 2_000

    def least_s(run: Callable[..., object], count: int, runs: int) -> float:
        spent = []
        for _ in range(runs):
            factors = start()
            begun = time.perf_counter()
            run(u[:count], i[:count], v[:count], *factors, np.float32(0.005), np.float32(0.02))
            spent.append(time.perf_counter() - begun)
        return min(spent)

    one, two = with_workers(sgd, 1), with_workers(sgd, 2)
    for each in (one, two):
        least_s(each, num_ratings, 1)  # compiles, and measures the loop
    # In turn, so that what slows the machine slows both.
    pairs = [(least_s(one, num_ratings, 1), least_s(two, num_ratings, 1)) for _ in range(repeats)]
    one_s, two_s = (min(each) for each in zip(*pairs, strict=True))
    plain_s = least_s(sgd.function, few, 1) * num_ratings / few
    return one_s / two_s, plain_s / two_s


QUICK = ("symm", "doitgen", "correlation")


def ours(num_ratings: int, repeats: int, loops: Sequence[str] = tuple(FRESH)) -> str:
    """Figures of the row in docs/systems.md."""
    over_one, over_plain = factorisation(num_ratings, repeats)
    rows = [row(name, 1, repeats) for name in loops]
    sound = sum(each["sound"] for each in rows)
    slower = sum(each["over_plain"] < 1 for each in rows)
    over_njit = mean([each["over_njit"] for each in rows])
    return (f"matrix factorisation on two threads {over_one:.1f}x one, {over_plain:,.0f}x plain "
            f"Python; {sound} of {len(rows)} loops in no test sound, {slower} slower than plain "
            f"Python, {over_njit:.2f}x of bounds-checked njit on one core")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ratings", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few ratings and three loops")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    quick = (20_000, 1, QUICK)
    print(ours(*quick) if options.quick else ours(options.ratings, options.repeats))
