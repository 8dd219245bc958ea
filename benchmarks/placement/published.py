"""Inception-V3, GNMT and a Transformer on four RTX 2080: our planners beside the published figures.

    .venv/bin/python benchmarks/placement/published.py

Steps are what the simulator says on the ``rtx2080x4`` preset (the link that Baechi's authors
fitted), placement times are CPU seconds of this machine after kernels are compiled. The published
figures are other implementations of these models on the real machine, so compare the ratios to the
expert and to one GPU, not the milliseconds. Results: ``docs/concepts/placement.md``.
"""

from __future__ import annotations

import math
import time

import suite

from hocket.api import make_problem
from hocket.plan.problem import Problem
from hocket.planners import PLANNERS
from hocket.planners.candidates import propose

NAMES = ("one-device", "m-topo", "m-etf", "m-sct", "pardnn", "auto")
EXPERT = {"inception-v3": "one-device", "gnmt-4": "layer-blocks", "t5-base": "layer-blocks"}
"""What an expert does: Inception fits one GPU and has no split that pays; layers in turn else."""
CASES = (
    ("inception-v3", {"batch": 32}, "1 GPU .269, expert .269, m-TOPO .286, m-ETF .269, m-SCT .269"),
    ("inception-v3", {"batch": 64}, "1 GPU .491, expert .491, m-TOPO .521, m-ETF .491, m-SCT .491"),
    ("gnmt-4", {"batch": 128, "seq": 40},
     "1 GPU .251, expert .214, m-TOPO .265, m-ETF .224, m-SCT .212"),
    ("gnmt-4", {"batch": 128, "seq": 50},
     "1 GPU .319, expert .259, m-TOPO .348, m-ETF .264, m-SCT .267"),
    ("t5-base", {"batch": 16, "seq": 50},
     "Transformer: 1 GPU .249, expert .257, m-TOPO .262, m-ETF .242, m-SCT .244"),
)  # fmt: skip


def measured(problem: Problem, name: str) -> tuple[float, float]:
    """Step and CPU seconds of the planner; a first run on a part of the work compiles kernels."""
    started = time.process_time()
    candidate = propose(problem, name, PLANNERS[name])
    return candidate.step_s or math.nan, time.process_time() - started


def main() -> None:
    warm = make_problem(suite.generate("gnmt", 500, 0), "rtx2080x4")
    for name in NAMES:
        propose(warm, name, PLANNERS[name])
    print("| model | ops | planner | step, ms | of the expert | placement, CPU s |")
    print("|---|---|---|---|---|---|")
    for model, options, published in CASES:
        problem = make_problem(suite.step_of(model, **options), "rtx2080x4")
        expert_s, expert_cpu_s = measured(problem, EXPERT[model])
        label = f"{model}, {', '.join(f'{key} {value}' for key, value in options.items())}"
        rows = [(f"expert ({EXPERT[model]})", expert_s, expert_cpu_s)]
        rows += [(name, *measured(problem, name)) for name in NAMES]
        for name, step_s, cpu_s in rows:
            print(
                f"| {label} | {problem.graph.num_ops:,} | {name} | {1e3 * step_s:,.4g} | "
                f"{step_s / expert_s:.3f} | {cpu_s:.2f} |",
                flush=True,
            )
        print(f"| {label} | | published, s | {published} | | |")


if __name__ == "__main__":
    main()
