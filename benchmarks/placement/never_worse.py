"""Is ``auto`` ever worse than what a user can name instead? Planners, orders after them, searches.

    .venv/bin/python benchmarks/placement/never_worse.py              # all, about half an hour
    .venv/bin/python benchmarks/placement/never_worse.py fork-join    # names that contain a word

Problems that no other table here uses: generated graphs of other seeds, fork-joins with heavy
tensors, public graphs on other clusters, small captured models. Each is planned by ``auto``, by
every registered planner (`optimal` where it takes the graph), by each of them with every order
after it, and by some of these with a local search after that. What is printed is how often one of
each sort is shorter than ``auto``, and by how much at most.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

import numpy as np
import suite

from hocket.api import make_problem
from hocket.base.errors import HocketError
from hocket.graph import Graph, GraphBuilder, Role
from hocket.graph.files import read_graph
from hocket.graph.generators import generate
from hocket.plan.problem import Problem
from hocket.planners import find_planner
from hocket.planners.candidates import Candidate, propose
from hocket.planners.order import ORDERS
from hocket.planners.registry import PLACERS

MIB = 2**20
NUM_SEARCHES = 6
"""Local searches per problem: each takes as long as a good part of ``auto``."""


def fork_join(num_ops: int, seed: int) -> Graph:
    """Stages of parallel chains that meet, with results of up to 64 MiB."""
    random = np.random.default_rng(seed)
    builder = GraphBuilder(f"fork-join-{num_ops}")
    start = builder.tensor("batch", MIB, role=Role.INPUT)
    made, index = start, 0

    def op(name: str, reads: list[int]) -> int:
        nonlocal index
        index += 1
        weight = builder.tensor(f"{name}.w", int(random.integers(1, 8)) * MIB, role=Role.PARAMETER)
        number = builder.op(
            name, reads=[*reads, weight], flops=float(random.uniform(1e9, 2e11)),
            bytes_touched=64 * MIB,
        )  # fmt: skip
        size = int(random.choice([1, 4, 16, 64])) * MIB
        return builder.tensor(f"{name}.out", size, producer=number)

    while index < num_ops:
        ends = []
        for branch in range(int(random.integers(2, 9))):
            end = made
            for depth in range(int(random.integers(1, 6))):
                end = op(f"s{index}.b{branch}.{depth}", [end])
            ends.append(end)
        made = op(f"join{index}", ends)
    return builder.build()


def problems() -> Iterator[tuple[str, Problem]]:
    """All of them, with their names."""
    clusters = ("4xv100-16g", "1xv100-32g+2xt4", "rtx2080x4", "2xa100-40g", "8xv100-16g")
    for index, on in enumerate(clusters):
        for size in (12, 60, 400, 1_500):
            for family in ("layered", "series-parallel", "gnmt") + ("transformer",) * (size >= 60):
                graph = generate(family, size, 1_000 + index)
                yield f"{family}-{graph.num_ops}, {on}", make_problem(graph, on)
            yield f"fork-join-{size}, {on}", make_problem(fork_join(size, index), on)
    for name in ("densenet121", "squeezenet1_0", "resnet18", "resnet101"):
        path = suite.PROFILES / "image_classification" / "profiles" / name / "graph.txt"
        for on in ("rtx2080x4", "1xv100-32g+2xt4") if path.exists() else ():
            yield f"pipedream {name}, {on}", make_problem(read_graph(path), on)
    for name, options, on in (("gpt2", {"batch": 4, "seq": 256}, "2xt4"),
                              ("resnet50", {"batch": 32}, "1xv100-16g+2xt4")):  # fmt: skip
        yield f"{name}, {on}", make_problem(suite.step_of(name, **options), on)


def step_s(problem: Problem, name: str) -> float:
    """Seconds of what a planner proposes; infinite where it does not fit or refuses."""
    try:
        candidate: Candidate = propose(problem, name, find_planner(name))
    except HocketError:
        return np.inf
    return candidate.step_s or np.inf


def rivals(problem: Problem, seed: int) -> dict[str, list[str]]:
    """What a user can name, by sort."""
    slow = {"throughput"} if problem.graph.num_ops > 500 else set()
    placers = [name for name in PLACERS if name not in slow and name != "optimal"]
    orders = [f"{name}+order-{order}" for name in placers for order in ORDERS]
    chosen = np.random.default_rng(seed).permutation([*placers, *orders])[:NUM_SEARCHES]
    return {
        "planners": [*placers, *(["optimal"] if problem.graph.num_ops <= 16 else [])],
        "with an order": orders,
        "with a local search": [f"{name}+local-search" for name in chosen],
    }


def main() -> None:
    words = sys.argv[1:]
    worst: dict[str, list[tuple[float, str, str]]] = {}
    count = 0
    for seed, (name, problem) in enumerate(problems()):
        if words and not any(word in name for word in words):
            continue
        count += 1
        started = time.process_time()
        auto_s = step_s(problem, "auto")
        seconds = time.process_time() - started
        told = []
        for sort, names in rivals(problem, seed).items():
            best_s, best = min((step_s(problem, rival), rival) for rival in names)
            gain = auto_s / best_s - 1 if np.isfinite(best_s) else 0.0
            if gain > 1e-9:
                worst.setdefault(sort, []).append((gain, name, best))
            told.append(f"{gain:+.2%} {best}")
        print(f"{name}: {1e3 * auto_s:.5g} ms in {seconds:.1f} s; " + "; ".join(told), flush=True)
    for sort in ("planners", "with an order", "with a local search"):
        found = sorted(worst.get(sort, []), reverse=True)
        most = f", by up to {found[0][0]:.1%} ({found[0][1]}: {found[0][2]})" if found else ""
        print(f"{sort}: auto is worse on {len(found)} of {count}{most}")


if __name__ == "__main__":
    main()
