"""Is ``auto`` ever worse than what a user can name instead? Planners, orders after them, searches.

    .venv/bin/python benchmarks/placement/never_worse.py rows.jsonl            # all, half an hour
    .venv/bin/python benchmarks/placement/never_worse.py rows.jsonl --most 5   # five more of them
    .venv/bin/python benchmarks/placement/never_worse.py rows.jsonl --table    # what is there
    .venv/bin/python benchmarks/placement/never_worse.py fresh.jsonl --seed 5  # generated anew

Problems that no other table here uses: generated graphs of other seeds, fork-joins with heavy
tensors, public graphs on other clusters, small captured models. Each is planned by ``auto``, by
every registered planner (`optimal` where it takes the graph), by each of them with every order
after it, and by some of these with a local search after that. What is printed is how often one of
each sort is shorter than ``auto``, and by how much at most. A problem is a line of the file, which
a later run goes on from.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import suite

from hocket.base.errors import HocketError
from hocket.graph import Graph, GraphBuilder, Role
from hocket.graph.files import read_graph
from hocket.graph.generators import generate
from hocket.plan.make import make_problem
from hocket.plan.problem import Problem
from hocket.planners import find_planner
from hocket.planners.candidates import judge, propose
from hocket.planners.registry import PLACERS, REFINERS

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


def problems(seed: int) -> Iterator[tuple[str, Problem]]:
    """All of them, with their names; ``seed`` is of those that are generated."""
    clusters = ("4xv100-16g", "1xv100-32g+2xt4", "rtx2080x4", "2xa100-40g", "8xv100-16g")
    for size in (12, 60, 400, 1_500):
        for index, on in enumerate(clusters):
            for family in ("layered", "series-parallel", "gnmt") + ("transformer",) * (size >= 60):
                graph = generate(family, size, 1_000 + 100 * seed + index)
                yield f"{family}-{graph.num_ops}, {on}", make_problem(graph, on)
            yield f"fork-join-{size}, {on}", make_problem(fork_join(size, 100 * seed + index), on)
    for name in ("densenet121", "squeezenet1_0", "resnet18", "resnet101"):
        path = suite.PROFILES / "image_classification" / "profiles" / name / "graph.txt"
        for on in ("rtx2080x4", "1xv100-32g+2xt4") if path.exists() else ():
            yield f"pipedream {name}, {on}", make_problem(read_graph(path), on)
    for name, options, on in (("gpt2", {"batch": 4, "seq": 256}, "2xt4"),
                              ("resnet50", {"batch": 32}, "1xv100-16g+2xt4")):  # fmt: skip
        yield f"{name}, {on}", make_problem(suite.step_of(name, **options), on)


def planned(problem: Problem, name: str, known: dict[str, tuple[float, Any]]) -> float:
    """Seconds of what a chain of planners proposes; infinite where it does not fit or refuses."""
    if name not in known:
        first, _, last = name.rpartition("+")
        try:
            if first:
                planned(problem, first, known)
                start = known[first][1]
                plan = None if start is None else REFINERS[last](problem, start)
                made = None if plan is None else judge(problem, name, plan, 0.0)
            else:
                made = propose(problem, name, find_planner(name))
        except HocketError:
            made = None
        known[name] = (np.inf, None) if made is None else (made.step_s or np.inf, made.plan)
    return known[name][0]


def rivals(problem: Problem, seed: int) -> dict[str, list[str]]:
    """What a user can name, by sort."""
    slow = {"throughput"} if problem.graph.num_ops > 500 else set()
    placers = [name for name in PLACERS if name not in slow and name != "optimal"]
    after = [name for name in REFINERS if name.startswith("order-")]
    orders = [f"{name}+{order}" for name in placers for order in after]
    chosen = np.random.default_rng(seed).permutation([*placers, *orders])[:NUM_SEARCHES]
    return {
        "planners": [*placers, *(["optimal"] if problem.graph.num_ops <= 16 else [])],
        "with an order": orders,
        "with a local search": [f"{name}+local-search" for name in chosen],
    }


def row_of(name: str, problem: Problem, seed: int) -> dict[str, Any]:
    """How long ``auto`` and the best of each sort take."""
    started = time.process_time()
    row: dict[str, Any] = {"name": name, "auto_s": planned(problem, "auto", {})}
    row["cpu_s"] = time.process_time() - started
    known: dict[str, tuple[float, Any]] = {}
    for sort, names in rivals(problem, seed).items():
        best_s, best = min((planned(problem, rival, known), rival) for rival in names)
        row[sort] = [best, best_s]
    return row


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    """The table and what it says, as Markdown."""
    sorts = ("planners", "with an order", "with a local search")
    heads = ["problem", "auto, ms", "CPU s", *(f"best {sort}" for sort in sorts)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["name"], f"{1e3 * row['auto_s']:,.5g}", f"{row['cpu_s']:.1f}"]
        cells += [f"{row[sort][1] / row['auto_s'] - 1:+.2%} {row[sort][0]}" for sort in sorts]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Beside each planner: how much longer than auto's its step is.", ""]
    for sort in sorts:
        found = sorted(
            (
                (row["auto_s"] / row[sort][1] - 1, row["name"], row[sort][0])
                for row in rows
                if row["auto_s"] > row[sort][1] * (1 + 1e-9)
            ),
            reverse=True,
        )
        most = f", by up to {found[0][0]:.2%} ({found[0][1]}: {found[0][2]})" if found else ""
        lines.append(f"- {sort}: auto is worse on {len(found)} of {len(rows)}{most}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", type=Path)
    parser.add_argument("--most", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    text = options.rows.read_text() if options.rows.exists() else ""
    rows = [json.loads(line) for line in text.splitlines()]
    left = 0 if options.table else options.most
    for seed, (name, problem) in enumerate(problems(options.seed)):
        if left == 0:
            break
        if any(row["name"] == name for row in rows):
            continue
        rows.append(row_of(name, problem, seed))
        with options.rows.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        left -= 1
    print("\n".join(lines_of(rows)))


if __name__ == "__main__":
    main()
