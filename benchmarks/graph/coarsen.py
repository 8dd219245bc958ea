"""How much smaller graphs become by coarsening, how long that takes, and what it does to memory.

    .venv/bin/python benchmarks/graph/coarsen.py [GRAPH.json.gz | FAMILY:NUM_OPS | ZOO-MODEL ...]

Caps are those for four devices. Times are processor time, best of three, after compiling; peaks are
of all ops on one device, simulated on the coarse graph and on the full one.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hocket.graph import Graph, generate, read_graph
from hocket.graph.coarsen import Coarse, forward_only, fuse
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.placement.coarse import coarse_problem, default_units, expand, fastest_s
from hocket.simulate.engine import simulate

CLUSTER = "4xv100-16g"
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "placement" / "pipedream" / "profiler"
DEFAULT = (
    str(PUBLISHED / "image_classification" / "profiles" / "inception_v3" / "graph.txt"),
    "inception-v3", "gnmt-4", "gnmt-8", "gpt2", "gnmt:204800", "transformer:200000",
)  # fmt: skip


def load(spec: str) -> Graph:
    if ":" in spec:
        family, num_ops = spec.split(":")
        return generate(family, int(num_ops), 0)
    if Path(spec).exists():
        return read_graph(spec)
    from hocket.capture import capture
    from hocket.capture.zoo.load import load_model

    return capture(*load_model(spec))


def best_of_three(run: Callable[[], Coarse]) -> tuple[Coarse, float]:
    times = []
    for _ in range(3):
        start_s = time.process_time()
        result = run()
        times.append(time.process_time() - start_s)
    return result, min(times)


def peak_bytes(problem: Problem, coarse: Coarse) -> tuple[int, int]:
    """On one device: of the coarse graph, and of its expanded plan."""
    on_one = Plan().placing(
        np.zeros(coarse.graph.num_ops, dtype=np.int32),
        priority=np.arange(coarse.graph.num_ops, dtype=np.float64),
    )
    small = simulate(coarse_problem(problem, coarse), on_one)
    fine = simulate(problem, expand(problem, coarse, on_one))
    return int(small.peak_bytes[0]), int(fine.peak_bytes[0])


def main() -> None:
    print(f"{platform.machine()}, Python {platform.python_version()}, caps for {CLUSTER}")
    print(f"{'graph':24}{'ops':>8}{'units':>8}{'nodes':>8}{'forward':>9}"
          f"{'units s':>9}{'fuse s':>8}{'forw. s':>8}{'peak':>7}{'peak f.':>8}")  # fmt: skip
    for spec in sys.argv[1:] or DEFAULT:
        graph = load(spec)
        problem = make_problem(graph, CLUSTER)
        op_s = fastest_s(problem)
        times = []
        for _ in range(3):
            start_s = time.process_time()
            units = default_units(problem, op_s)
            times.append(time.process_time() - start_s)
        few = default_units(problem, op_s, joins_gradients=False)
        fused, fuse_s = best_of_three(lambda g=graph, u=units, s=op_s: fuse(g, u, s))
        forward, forward_s = best_of_three(lambda g=graph, u=few, s=op_s: forward_only(g, u, s))
        ratios = [a / b for a, b in (peak_bytes(problem, c) for c in (fused, forward))]
        name = Path(spec).parent.name if Path(spec).suffix == ".txt" else Path(spec).name
        print(f"{name:24}{graph.num_ops:8}{int(units.max()) + 1:8}{fused.graph.num_ops:8}"
              f"{forward.graph.num_ops:9}{min(times):9.3f}{fuse_s:8.3f}{forward_s:8.3f}"
              f"{ratios[0]:7.3f}{ratios[1]:8.3f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
