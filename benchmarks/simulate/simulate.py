"""How fast the simulator is: growth with the graph, compiling, loading, and against SimPy.

    .venv/bin/python benchmarks/simulate/simulate.py            # everything, some minutes
    .venv/bin/python benchmarks/simulate/simulate.py 10000      # growth for one size only

Each op of a GNMT-like training step is placed on one of 16 devices behind a switch: at random
(nearly every tensor is sent) or in 16 contiguous blocks. Times are the best of three, include all
preparation, and exclude making the problem. They are CPU seconds of the process, which uses one
core, so that other work on the machine disturbs them less. Results: ``docs/concepts/simulator.md``.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from hocket.cost.costs import Costs, TimeSource, device_rows
from hocket.graph.generators import generate
from hocket.graph.graph import Graph
from hocket.hardware import Cluster, Device, DeviceKind, Link
from hocket.plan.plan import Plan
from hocket.plan.problem import TRANSFER_MODES, Problem, TransferMode
from hocket.simulate import simulate

SIZES = (10_000, 50_000, 200_000, 1_000_000)
NUM_DEVICES = 16
FRESH = """
import sys
import time
sys.path.insert(0, {folder!r})
from simulate import placement, problem_of, simulate
from hocket.graph.generators import generate
problem = problem_of(generate("gnmt", 2000), "shared")
plan = placement(problem, "blocks")
wall_s, cpu_s = time.perf_counter(), time.process_time()
simulate(problem, plan)
print(time.perf_counter() - wall_s, time.process_time() - cpu_s)
"""


def star() -> Cluster:
    """Devices behind one switch."""
    kind = DeviceKind(
        name="gpu", memory_bytes=2**34, peak_flops={"float32": 1e13}, memory_bandwidth_bps=1e12
    )
    names = [f"gpu{index}" for index in range(NUM_DEVICES)]
    return Cluster(
        name="star",
        devices=tuple(
            Device(name=name, kind=kind, host="host", memory_bytes=2**34) for name in names
        ),
        hosts=("host",),
        switches=("switch",),
        links=tuple(
            Link(name=name, ends=(name, "switch"), bandwidth_bps=5e10, latency_s=5e-6)
            for name in names
        ),
    )


def problem_of(graph: Graph, transfers: TransferMode) -> Problem:
    """The graph on 16 devices, with times from a roofline."""
    cluster = star()
    op_s = 5e-6 + np.maximum(graph.flops / 1e13, graph.bytes_touched / 1e12)[None]
    # Without this, ops of one kind end at the same instant, where SimPy knows no order of tensors.
    op_s = op_s * np.random.RandomState(0).uniform(0.9, 1.1, op_s.shape)
    costs = Costs(
        kind_names=("gpu",),
        op_s=op_s,
        op_source=np.full(op_s.shape, TimeSource.MODEL, dtype=np.uint8),
        device_row=device_rows(cluster),
        routes=cluster.routes,
        tensor_bytes=graph.tensor_bytes,
        settings={},
    )
    return Problem(work=graph, cluster=cluster, op_costs=costs, transfers=transfers)


def placement(problem: Problem, form: str) -> Plan:
    """At random, or in blocks of equal size."""
    num_ops = problem.graph.num_ops
    if form == "random":
        return Plan().placing(np.random.RandomState(0).randint(0, NUM_DEVICES, num_ops))
    return Plan().placing(np.arange(num_ops) * NUM_DEVICES // num_ops)


def best_s(problem: Problem, plan: Plan, repeats: int = 3) -> float:
    """The shortest of some runs, in seconds of the one core that is used."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        simulate(problem, plan)
        times.append(time.process_time() - begin)
    return min(times)


def growth(sizes: tuple[int, ...]) -> None:
    print("\n| ops | placement | transfers | " + " | ".join(f"{m}, s" for m in TRANSFER_MODES), "|")
    print("|---|---|---|" + "---|" * len(TRANSFER_MODES))
    for num_ops in sizes:
        graph = generate("gnmt", num_ops)
        for form in ("random", "blocks"):
            seconds, sent = [], 0
            for mode in TRANSFER_MODES:
                problem = problem_of(graph, mode)
                plan = placement(problem, form)
                sent = len(simulate(problem, plan).transfer_tensor)
                seconds.append(best_s(problem, plan))
            cells = " | ".join(f"{s:.3f}" for s in seconds)
            print(f"| {graph.num_ops:,} | {form} | {sent:,} | {cells} |", flush=True)


def fresh_process() -> None:
    """Time of the first simulation with an empty and with a filled cache."""
    folder = str(Path(__file__).parent)
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "NUMBA_CACHE_DIR": cache}
        for label in ("compiling (empty cache)", "loading (filled cache)", "loading again"):
            text = FRESH.format(folder=folder)
            result = subprocess.run(
                [sys.executable, "-c", text], env=env, check=True, capture_output=True, text=True
            )
            wall_s, cpu_s = map(float, result.stdout.split())
            print(f"first simulation of 2,000 ops, {label}: {cpu_s:.2f} s CPU, {wall_s:.2f} s")


def against_simpy(num_ops: int = 20_000) -> None:
    # This file is itself called simulate, so the model is imported from its own folder.
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "simulate"))
    from simpy_model import simpy_times

    graph = generate("gnmt", num_ops)
    modes: tuple[TransferMode, ...] = ("parallel", "queued")
    for mode in modes:
        problem = problem_of(graph, mode)
        plan = placement(problem, "random")
        ours_s = best_s(problem, plan)
        begin = time.process_time()
        op_end_s, _ = simpy_times(problem, plan)
        simpy_s = time.process_time() - begin
        same = np.allclose(simulate(problem, plan).op_end_s, op_end_s, rtol=1e-9)
        print(
            f"{graph.num_ops:,} ops, {mode}: SimPy {simpy_s:.2f} s, hocket {ours_s:.3f} s, "
            f"ratio {simpy_s / ours_s:.0f}, same times: {same}"
        )


def main() -> None:
    import numba

    load = os.getloadavg()[0]
    print(
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, load {load:.1f}, Python {platform.python_version()}, "
        f"numpy {np.__version__}, numba {numba.__version__}"
    )
    if len(sys.argv) > 1:
        growth(tuple(int(size) for size in sys.argv[1:]))
        return
    fresh_process()
    growth(SIZES)
    print()
    against_simpy()


if __name__ == "__main__":
    main()
