"""Loads of the busiest device on the published instances, against the published values.

    .venv/bin/python benchmarks/placement/max_load.py  # all 16 instances, about two minutes
    .venv/bin/python benchmarks/placement/max_load.py bert24 gnmt  # names that contain one of these

Reads ``../shared/data/placement/dnn-partitioning``: graphs of Tarnawski et al., NeurIPS 2020, and
``reference_max_load.csv`` with the values of the authors' programs and of a CP-SAT model. Loads are
in the unit of the files, taken as milliseconds; seconds are CPU seconds of one core, after
compiling. Results: ``docs/concepts/throughput.md``.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from hocket.graph.files import read_graph
from hocket.plan.make import make_problem
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners.max_load import dpl, pipedream, throughput

DATA = Path(__file__).parents[3] / "shared" / "data" / "placement" / "dnn-partitioning"


def problem_of(instance: str, *, contiguous: bool) -> Problem:
    problem = make_problem(read_graph(DATA / instance), "file")
    return replace(problem, objective="throughput", contiguous=contiguous)


def timed(planner: Callable[[Problem, Plan], Plan], problem: Problem) -> tuple[Plan, float]:
    begin = time.process_time()
    plan = planner(problem, Plan())
    return plan, time.process_time() - begin


def contiguous_table(rows: list[dict[str, str]]) -> None:
    print("\n| instance | size | pipedream | dpl | throughput | reference | proven | s |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        problem = problem_of(row["instance"], contiguous=True)
        loads = [1e3 * timed(p, problem)[0].claims.max_load_s for p in (pipedream, dpl)]
        plan, seconds = timed(throughput, problem)
        reference = float(row["dp_contig_optimum"] or row["cpsat_contig_best"])
        mark = "" if row["dp_contig_optimum"] else " (CP-SAT)"
        print(
            f"| {name_of(row)} | {problem.graph.num_ops:,} ops | {loads[0]:.3f} | {loads[1]:.3f} "
            f"| {1e3 * plan.claims.max_load_s:.3f} | {reference:.3f}{mark} "
            f"| {'yes' if plan.claims.proven else 'no'} | {seconds:.2f} |",
            flush=True,
        )


def free_table(rows: list[dict[str, str]]) -> None:
    print("\n| instance | throughput | bound | reference | its bound | below contiguous | s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        plan, seconds = timed(throughput, problem_of(row["instance"], contiguous=False))
        ordered, _ = timed(throughput, problem_of(row["instance"], contiguous=True))
        load_s, bound_s = plan.claims.max_load_s, plan.claims.load_bound_s
        print(
            f"| {name_of(row)} | {1e3 * load_s:.3f}{' =' if plan.claims.proven else ''} "
            f"| {1e3 * bound_s:.3f} | {float(row['cpsat_noncontig_best']):.3f} "
            f"| {float(row['cpsat_noncontig_bound']):.3f} "
            f"| {100 * (1 - load_s / ordered.claims.max_load_s):.1f} % | {seconds:.2f} |",
            flush=True,
        )


def name_of(row: dict[str, str]) -> str:
    path = Path(row["instance"])
    return f"{path.stem.lower()} ({path.parts[-2].removesuffix('Graphs').lower()}s)"


def main() -> None:
    import numba

    with (DATA / "reference_max_load.csv").open() as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if not sys.argv[1:] or any(word in row["instance"] for word in sys.argv[1:])
        ]
    print(
        f"{datetime.date.today()}, {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, numpy {np.__version__}, numba {numba.__version__}"
    )
    for contiguous in (True, False):
        begin = time.process_time()
        timed(throughput, problem_of(rows[0]["instance"], contiguous=contiguous))
        print(f"compiling or loading, {contiguous=}: {time.process_time() - begin:.1f} s")
    contiguous_table(rows)
    free_table(rows)


if __name__ == "__main__":
    main()
