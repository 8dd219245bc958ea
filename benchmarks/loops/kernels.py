"""Sixty loops that no test has: sound, never slower than plain Python, near bounds-checked numba.

python benchmarks/loops/kernels.py [--fresh] [--only NAME ...] [--workers 1] [--repeats 7]

Per loop: whether ``ordered=True`` has the bits of plain Python (or differs only where `explain`
says so), the schedule, how often faster than plain Python when the loop is short (CPU time of one
call, after the first), and CPU time over ``numba.njit(boundscheck=True)`` at full size on one
worker. The last lines are geometric means. Ratios of CPU times bear a busy machine.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from fresh_loops import FRESH
from kernel_loops import KERNELS

import hocket

POLYBENCH_LIKE = ("gemm", "atax", "gemver", "syrk", "trisolv", "lu", "cholesky", "jacobi_2d",
                  "seidel", "covariance")  # fmt: skip
OTHERS = ("spmv", "spmm", "group_by", "coo", "bfs", "page_rank", "box_blur", "sobel", "life",
          "knapsack")  # fmt: skip


def cpu_s(function: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> float:
    """Least CPU time of a call on fresh data; short calls are taken several at a time."""
    best = math.inf
    for _ in range(repeats):
        given = copy.deepcopy(arguments)
        start = time.process_time()
        function(*given)
        best = min(best, time.process_time() - start)
    if best > 2e-3:
        return best
    for _ in range(repeats):
        copies = [copy.deepcopy(arguments) for _ in range(20)]
        start = time.process_time()
        for given in copies:
            function(*given)
        best = min(best, (time.process_time() - start) / 20)
    return best


def outcome(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, list[Any]]:
    """What a call returns, and what it leaves in its arguments."""
    given = copy.deepcopy(arguments)
    return function(*given), [part for part in given if isinstance(part, np.ndarray)]


def same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]], *, exact: bool) -> bool:
    """Equal bits, or equal to rounding where something is named that may differ."""
    arrays = zip([np.asarray(one[0], dtype=float), *one[1]],
                 [np.asarray(other[0], dtype=float), *other[1]], strict=True)  # fmt: skip
    if exact:
        return all(np.array_equal(a, b, equal_nan=True) for a, b in arrays)
    return all(np.allclose(a, b, rtol=1e-9, equal_nan=True) for a, b in arrays)


def small(size: int, function: Callable[..., Any], make: Callable[[int], Any]) -> tuple[Any, ...]:
    """Arguments for which plain Python takes a few milliseconds."""
    while True:
        arguments = make(size)
        start = time.process_time()
        function(*copy.deepcopy(arguments))
        if time.process_time() - start < 0.01 or size < 12:
            return tuple(arguments)
        size = max(size * 2 // 3, 11)


def row(name: str, workers: int, repeats: int) -> dict[str, Any]:
    """Check and time one loop."""
    import numba

    function, make, size = {**KERNELS, **FRESH}[name]
    few = small(size, function, make)
    ordered = hocket.parallel_for(ordered=True, workers=2, backend="threads")(function)
    expected = outcome(function, few)
    found = [outcome(ordered, few) for _ in range(2)]
    named = [d for each in ordered.decisions() if each.source for d in each.source.deviations]
    is_sound = all(same(each, expected, exact=not named) for each in found)
    decorated = hocket.parallel_for(workers=workers)(function)
    reference = numba.njit(boundscheck=True)(function)
    many = make(size)
    first = time.perf_counter()
    outcome(decorated, many)
    first = time.perf_counter() - first
    outcome(reference, many)
    ours_s, njit_s = cpu_s(decorated, many, repeats), cpu_s(reference, many, repeats)
    for _ in range(12):  # as often as a program would call it before it matters
        outcome(decorated, few)
    short_s, plain_s = cpu_s(decorated, few, repeats), cpu_s(function, few, 3)
    schedules = [
        d.candidate.option.shape.kind if d.candidate is not None else d.execution
        for d in ordered.decisions()
    ]
    return {
        "name": name, "sound": is_sound, "named": len(named), "schedules": "+".join(schedules),
        "over_plain": plain_s / short_s, "over_njit": ours_s / njit_s, "first_s": first,
        "ms": ours_s * 1e3,
    }  # fmt: skip


def mean(values: list[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / max(len(values), 1))


def main() -> None:
    """Print a row per loop."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--fresh", action="store_true", help="the second sixty")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    head = f"{'loop':20} {'sound':6} {'/njit':>6} {'x plain':>8} {'first s':>8} {'ms':>8}  ordered"
    print(head)
    for name in options.only or (FRESH if options.fresh else KERNELS):
        found = row(name, options.workers, options.repeats)
        rows.append(found)
        sound = ("yes" if not found["named"] else "named") if found["sound"] else "NO"
        print(
            f"{name:20} {sound:6} {found['over_njit']:6.2f} {found['over_plain']:8.1f} "
            f"{found['first_s']:8.2f} {found['ms']:8.2f}  {found['schedules']}",
            flush=True,
        )
    slower = [r["name"] for r in rows if r["over_plain"] < 1.0]
    sound = sum(r["sound"] for r in rows)
    print(f"sound {sound} of {len(rows)}; slower than plain Python: {slower or 'none'}")
    print(f"CPU time over njit(boundscheck=True), geometric mean of {len(rows)}: "
          f"{mean([r['over_njit'] for r in rows]):.3f}")  # fmt: skip
    picked = [r["over_njit"] for r in rows if r["name"] in (*POLYBENCH_LIKE, *OTHERS)]
    if picked:
        print(f"of the 20 PolyBench, sparse, graph and image loops: {mean(picked):.3f}")


if __name__ == "__main__":
    main()
