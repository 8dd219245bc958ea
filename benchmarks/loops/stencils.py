"""Gauss-Seidel and a (1, -1) stencil, 4k x 4k: two threads against compiled serial, same bits.

python benchmarks/loops/stencils.py [--size 4000] [--repeats 5]
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import hocket


def gauss_seidel(A):
    n, m = A.shape
    for i in range(1, n - 1):
        for j in range(1, m - 1):
            A[i, j] = 0.25 * (A[i - 1, j] + A[i + 1, j] + A[i, j - 1] + A[i, j + 1])


def one_minus_one(A):
    n, m = A.shape
    for i in range(1, n):
        for j in range(1, m - 1):
            A[i, j] = 0.5 * (A[i - 1, j + 1] + A[i, j - 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    from numba import njit

    for function in (gauss_seidel, one_minus_one):
        serial = njit(error_model="numpy")(function)
        threads = hocket.parallel_for(ordered=True, workers=2)(function)
        plates = [np.random.default_rng(0).random((options.size, options.size)) for _ in range(2)]
        best = [9e9, 9e9]
        for _ in range(options.repeats + 1):
            for place, run in enumerate((serial, threads)):
                start = time.perf_counter()
                run(plates[place])
                best[place] = min(best[place], time.perf_counter() - start)
        same = plates[0].tobytes() == plates[1].tobytes()
        kind = threads.explain().loops[0].schedule
        print(f"{function.__name__}: {kind}, serial {best[0] * 1e3:.0f} ms, 2 threads "
              f"{best[1] * 1e3:.0f} ms, {best[0] / best[1]:.2f}x, same bits: {same}")  # fmt: skip


if __name__ == "__main__":
    main()
