"""Steps kept within budgets: are they kept, does time fall with room, what do the usual plans take.

    .venv/bin/python benchmarks/memory/budgets.py [--on 1xh200] [--only TEXT] [--num-budgets 24]
    .venv/bin/python benchmarks/memory/budgets.py --monet ../shared/data/memory

For each zoo model one frontier of plans is made; then budgets from the smallest that fits up to the
plain step's peak are asked for. Each chosen plan is carried into the graph and simulated anew by
``verify``. ``--monet`` compares recompute alone with published solver runs (`published.py`).
Times are predictions of the cost model; seconds are processor time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from published import published

from hocket.capture import capture, load_model
from hocket.plan.make import make_problem
from hocket.planners.candidates import empty_plan
from hocket.planners.memory.budget import BudgetFit
from hocket.planners.memory.frontier import find_frontier
from hocket.planners.memory.maker import FULL_OFFLOAD, FULL_RECOMPUTE, PLAIN
from hocket.simulate.verify import verify

GIB = 2**30
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {"batch": 2, "seq": 128},
    "gpt2-medium": {"batch": 8, "seq": 1024, "dtype": "bfloat16"},
    "llama-1b": {"batch": 4, "seq": 2048, "dtype": "bfloat16"},
    "bert-large": {"batch": 16, "seq": 128},
    "vit-base": {"batch": 32},
    "resnet50": {"batch": 64},
    "wide-resnet": {"batch": 32},
    "gnmt-4": {"batch": 64},
    "mlp": {"batch": 1024},
}


def main() -> int:
    """Print a line per model; exit code 6 where a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", default="1xh200")
    parser.add_argument("--only", default="")
    parser.add_argument("--num-budgets", type=int, default=24)
    parser.add_argument("--monet", type=Path)
    options = parser.parse_args()
    if options.monet is not None:
        return published(options.monet)
    print(
        "| model | ops | blocks | plain | smallest | bound | half | quarter | pairs | broken | s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    num_broken = num_pairs = 0
    for name, settings in CASES.items():
        if options.only in name:
            pairs, broken = row(name, settings, options.on, options.num_budgets)
            num_pairs, num_broken = num_pairs + pairs, num_broken + broken
    print(f"{num_pairs} pairs, {num_broken} broken")
    return 6 if num_broken else 0


def row(name: str, settings: dict[str, Any], on: str, num_budgets: int) -> tuple[int, int]:
    """Plan one model for all budgets and print what came out."""
    model, batch = load_model(name, **settings)
    graph = capture(model, batch, name=name)
    problem = make_problem(graph, on)
    plan = empty_plan(problem, "memory").placing(np.zeros(graph.num_ops, dtype=np.int32))
    started = time.process_time()
    frontier = find_frontier(problem, plan, async_update=True)
    seconds = time.process_time() - started
    plain, smallest = frontier.find(PLAIN), frontier.smallest
    assert plain is not None
    budgets = np.geomspace(smallest.peak_bytes, plain.peak_bytes, num_budgets).astype(int).tolist()
    broken, last_s = 0, float("inf")
    for budget in budgets:
        fit = BudgetFit(frontier, max(budget, smallest.peak_bytes))
        verify(fit.plan(), problem)
        assert fit.chosen is not None
        usual = [frontier.find(FULL_RECOMPUTE), frontier.find(FULL_OFFLOAD)]
        slower = any(
            p is not None and p.peak_bytes <= fit.budget_bytes and p.step_s < fit.chosen.step_s
            for p in usual
        )
        broken += fit.chosen.peak_bytes > fit.budget_bytes or fit.chosen.step_s > last_s or slower
        last_s = fit.chosen.step_s
    bound = BudgetFit(frontier, smallest.peak_bytes).lower_bound_bytes
    parts = [_times(frontier, plain.peak_bytes, part) for part in (2, 4)]
    print(
        f"| {name} {' '.join(str(v) for v in settings.values())} | {graph.num_ops:,} | "
        f"{frontier.uses.blocks.num_blocks} | {plain.peak_bytes / GIB:.2f} GiB "
        f"{plain.step_s * 1e3:.1f} ms | {smallest.peak_bytes / GIB:.3f} | {bound / GIB:.3f} | "
        f"{parts[0]} | {parts[1]} | {len(budgets)} | {broken} | {seconds:.1f} |",
        flush=True,
    )
    return len(budgets), broken


def _times(frontier: Any, peak: int, part: int) -> str:
    """Step at a part of the plain peak over the plain step: ours, and full recompute if it fits."""
    plain_s = frontier.find(PLAIN).step_s
    ours, full = frontier.best(peak // part), frontier.find(FULL_RECOMPUTE)
    told = "–" if ours is None else f"{ours.step_s / plain_s:.2f}"
    usual = f"{full.step_s / plain_s:.2f}" if full.peak_bytes <= peak // part else "✗"
    return f"{told} ({usual})"


if __name__ == "__main__":
    sys.exit(main())
