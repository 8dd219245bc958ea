"""How much does a step depend on the order in which a file lists the ops?

    PYTHONPATH=src:tests .venv/bin/python benchmarks/placement/file_order.py [--homes] [SIZES]

Graphs of so many ops are written in five topological orders and planned, which takes some minutes.
Printed per problem: by how much the longest of the steps is above the shortest, per planner. Shared
weights live with the op that reads them first: with ``--homes`` that is the same in every order.
"""

from __future__ import annotations

import sys

from planners.test_structural import shuffled

from hocket.api import make_problem
from hocket.graph.generators import generate
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.planners import find_planner
from hocket.simulate import simulate

FAMILIES = (("layered", 11), ("gnmt", 12), ("series-parallel", 13), ("transformer", 14))
CLUSTERS = ("4xv100-16g", "1xv100-32g+2xt4")
PLANNERS = ("m-topo", "m-etf", "m-sct", "pardnn", "auto")
NUM_ORDERS = 5


def spread(problem: Problem, name: str, *, keeps_homes: bool) -> float:
    """The longest step over the shortest, less one."""
    orders = [
        problem,
        *(shuffled(problem, 100 + n, keeps_homes=keeps_homes) for n in range(1, NUM_ORDERS)),
    ]
    steps_s = [simulate(each, find_planner(name)(each, Plan())).makespan_s for each in orders]
    return max(steps_s) / min(steps_s) - 1


def main() -> None:
    print("| problem |", " | ".join(PLANNERS), "|\n|---" + "|---" * len(PLANNERS) + "|")
    keeps_homes = "--homes" in sys.argv
    sizes = [text for text in sys.argv[1:] if text != "--homes"]
    for size in map(int, sizes or ("120", "400", "1200")):
        for family, seed in FAMILIES:
            for on in CLUSTERS:
                problem = make_problem(generate(family, size, seed), on)
                cells = [
                    f"{spread(problem, name, keeps_homes=keeps_homes):.2%}" for name in PLANNERS
                ]
                print(
                    f"| {family}-{problem.graph.num_ops}, {on} |",
                    " | ".join(cells),
                    "|",
                    flush=True,
                )


if __name__ == "__main__":
    main()
