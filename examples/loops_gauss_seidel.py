"""Heat in a plate by Gauss-Seidel: the order of the sweep is kept, bit for bit, on all cores.

python examples/loops_gauss_seidel.py --size 2000 --sweeps 20
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import hocket


@hocket.parallel_for(ordered=True)
def sweep(A):
    n, m = A.shape
    for i in range(1, n - 1):
        for j in range(1, m - 1):
            A[i, j] = 0.25 * (A[i - 1, j] + A[i + 1, j] + A[i, j - 1] + A[i, j + 1])


@hocket.parallel_for(ordered=True)
def nine_points(A):
    """With corners: the step (1, -1) needs skewed tiles."""
    n, m = A.shape
    for i in range(1, n - 1):
        for j in range(1, m - 1):
            A[i, j] = 0.2 * (A[i - 1, j] + A[i + 1, j] + A[i, j - 1] + A[i, j + 1]) + 0.05 * (
                A[i - 1, j - 1] + A[i - 1, j + 1] + A[i + 1, j - 1] + A[i + 1, j + 1]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=600)
    parser.add_argument("--sweeps", type=int, default=5)
    parser.add_argument("--points", type=int, choices=[5, 9], default=5)
    options = parser.parse_args()
    plate = np.zeros((options.size, options.size))
    plate[0] = 1.0
    run = sweep if options.points == 5 else nine_points
    for number in range(options.sweeps):
        start = time.perf_counter()
        run(plate)
        seconds = time.perf_counter() - start
        cells = plate.size / seconds / 1e6
        print(f"sweep {number + 1}: mean {plate.mean():.6f}, {cells:.0f} M cells/s")
    print(run.explain())


if __name__ == "__main__":
    main()
