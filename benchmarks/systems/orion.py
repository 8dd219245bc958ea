"""Orion's row: matrix factorisation on two threads, and sixty loops compared with numba.

Run: python benchmarks/systems/orion.py [--ratings 100000] [--repeats 5] [--quick]

Measured on this machine. The baseline of the factorisation is `numba.njit(fastmath=True)` on one
thread. One worker and two run kernels without index checks, since the same proof holds for both.
Ratios of wall times need two free cores, so the CPU time that two threads need together is printed
as well. The sixty loops are compared with `numba.njit(boundscheck=True)` by CPU time on one core,
which a busy machine changes little (benchmarks/loops/kernels.py prints every loop).
"""

from __future__ import annotations

import argparse
import math
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


def factorisation(num_ratings: int, repeats: int) -> str:
    """Two threads compared with njit, with one worker and with plain Python (per rating)."""
    import numba

    u, i, v = data(num_ratings)
    few = 2_000

    def spent_s(run: Callable[..., object], count: int) -> tuple[float, float]:
        """Wall and CPU seconds of one call."""
        factors = start()
        wall, cpu = time.perf_counter(), time.process_time()
        run(u[:count], i[:count], v[:count], *factors, np.float32(0.005), np.float32(0.02))
        return time.perf_counter() - wall, time.process_time() - cpu

    runs = {
        "njit": numba.njit(fastmath=True)(sgd.function),
        "one": with_workers(sgd, 1),
        "two": with_workers(sgd, 2),
    }
    for each in runs.values():
        spent_s(each, num_ratings)  # compiles
    least = {name: (math.inf, math.inf) for name in runs}
    for _ in range(repeats):  # in turn, so that a load on the machine slows all
        for name, each in runs.items():
            pairs = zip(least[name], spent_s(each, num_ratings), strict=True)
            least[name] = tuple(min(pair) for pair in pairs)  # type: ignore[assignment]
    plain_s = spent_s(sgd.function, few)[0] * num_ratings / few
    (njit_s, njit_cpu), (one_s, one_cpu), (two_s, two_cpu) = least.values()
    return (f"matrix factorisation on two threads {njit_s / two_s:.2f}x numba.njit on one thread "
            f"(CPU time {two_cpu / njit_cpu:.2f}x), {one_s / two_s:.2f}x one worker "
            f"({two_cpu / one_cpu:.2f}x), {plain_s / two_s:,.0f}x plain Python")  # fmt: skip


QUICK = ("symm", "doitgen", "correlation")


def ours(num_ratings: int, repeats: int, loops: Sequence[str] = tuple(FRESH)) -> str:
    """Figures of the row in docs/systems.md."""
    found = factorisation(num_ratings, repeats)
    rows = [row(name, 1, repeats) for name in loops]
    sound = sum(each["sound"] for each in rows)
    slower = sum(each["over_plain"] < 1 for each in rows)
    over_njit = mean([each["over_njit"] for each in rows])
    return (
        f"{found}; {sound} of {len(rows)} loops that no test contains are sound, {slower} slower "
        f"than plain Python, {over_njit:.2f}x the time of bounds-checked njit on one core"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ratings", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few ratings and three loops")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    quick = (20_000, 1, QUICK)
    print(ours(*quick) if options.quick else ours(options.ratings, options.repeats))
