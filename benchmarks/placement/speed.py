"""How long the placement planners take: growth with the graph, and compiling.

    .venv/bin/python benchmarks/placement/speed.py              # 2,000 to 204,800 ops, some minutes
    .venv/bin/python benchmarks/placement/speed.py 10000 50000  # these sizes only

GNMT-like training steps on 16 devices, transfers queued: cards behind PCIe, where most ops wait for
data, and behind NVSwitch, where they wait for a device. `-fine` places every op for itself, the
others place groups; in brackets the microseconds per op. Times are the better of two, include all
preparation, and exclude making the problem and the last simulation. One core is used.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from hocket.planners.candidates import Comparison

SIZES = (2_000, 10_000, 50_000, 204_800)
CLUSTERS = ("16xv100-32g", "dgx2")
PLANNERS = ("m-etf-fine", "m-sct-fine", "m-etf", "m-sct", "pardnn", "auto")


def best_s(work: Callable[[], Any], repeats: int = 3) -> float:
    """The shortest of some runs, in seconds of the one core that is used."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def planning_s(comparison: Comparison) -> float:
    """What planning took; the portfolio's time stands with its last candidate."""
    seconds = [candidate.plan_seconds for candidate in comparison.candidates]
    return seconds[-1] if comparison.candidates[-1].planner == "auto" else sum(seconds)


def growth(sizes: tuple[int, ...]) -> None:
    from hocket.graph.generators import generate
    from hocket.plan.make import make_problem
    from hocket.planners.compare import compare

    print(f"\n| ops | edges | cluster | {' | '.join(f'{name}, s' for name in PLANNERS)} |")
    print("|---|---|---|" + "---|" * len(PLANNERS))
    for num_ops in sizes:
        graph = generate("gnmt", num_ops, 0)
        num_edges = len(graph.edges[0])
        for cluster in CLUSTERS:
            cells = []
            for name in PLANNERS:
                # A new problem for every run: coarse graphs are remembered per problem.
                problems = [make_problem(graph, cluster, transfers="queued") for _ in range(2)]
                seconds = min(planning_s(compare(problem, [name])) for problem in problems)
                cells.append(f"{seconds:.2f} ({seconds / graph.num_ops * 1e6:.1f})")
            print(
                f"| {graph.num_ops:,} | {num_edges:,} | {cluster} | {' | '.join(cells)} |",
                flush=True,
            )


def compile_once() -> None:
    """Time of the first plan with an empty cache of compiled code and with a filled one."""
    from multiprocessing import get_context

    spawn = get_context("spawn")
    with tempfile.TemporaryDirectory() as cache:
        os.environ["NUMBA_CACHE_DIR"] = cache
        for label in ("compiling (empty cache)", "loading (filled cache)"):
            with spawn.Pool(1) as pool:
                etf_s, sct_s = pool.apply(first_plans)
            print(
                f"first plan of 4,000 ops, {label}: m-ETF {etf_s:.2f} s, then m-SCT {sct_s:.2f} s"
            )
        del os.environ["NUMBA_CACHE_DIR"]


def first_plans() -> tuple[float, float]:
    """CPU seconds of the first plans of a process."""
    from hocket.graph.generators import generate
    from hocket.plan.make import make_problem
    from hocket.plan.plan import Plan
    from hocket.planners.placement.m_etf import m_etf
    from hocket.planners.placement.m_sct import m_sct

    problem = make_problem(generate("gnmt", 4_000, 0), CLUSTERS[0], transfers="queued")
    return best_s(lambda: m_etf(problem, Plan()), 1), best_s(lambda: m_sct(problem, Plan()), 1)


def main() -> None:
    import numba
    import numpy as np

    print(
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}"
    )
    sizes = tuple(int(size) for size in sys.argv[1:])
    if not sizes:
        compile_once()
    growth(sizes or SIZES)


if __name__ == "__main__":
    main()
