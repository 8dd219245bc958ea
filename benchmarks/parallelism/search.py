"""How long the search for a config takes: scan of all configs, and recheck of the best 200.

    python benchmarks/parallelism/search.py [--rounds 3]

Prints CPU seconds of one core, after compilation, for GPT-3 175B on 4096 A100s (tensor and context
degrees up to 32) and for smaller cases.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from hocket.cost.parallel.softwares import find_software
from hocket.hardware import cluster_from_text
from hocket.plan.limits import Limits
from hocket.plan.problem import Problem
from hocket.plan.training import TransformerTraining
from hocket.planners.parallel.forecast import forecast_of
from hocket.planners.parallel.recheck import RecheckEffort, recheck
from hocket.planners.parallel.transformer_search import ROUNDS, compare_configs, described, scan
from hocket.transformer.files import find_model

CASES = (
    ("gpt3-175b", "512xdgx-a100-80g", 1536, 32, 32),
    ("gpt3-175b", "12xdgx-a100-80g", 96, 8, 16),
    ("llama3-70b", "8xdgx-h100", 256, 8, 16),
    ("llama3-8b", "1xdgx-h100", 64, 8, 16),
    ("mixtral-8x7b", "4xdgx-h100", 256, 8, 16),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    for model, on, batch, max_tensor, max_context in CASES:
        work = TransformerTraining(
            model=find_model(model), global_batch=batch, software=find_software("megatron-core")
        )
        problem = Problem(work=work, cluster=cluster_from_text(on))
        measure(problem, Limits(max_tensor=max_tensor, max_context=max_context), rounds)


def measure(problem: Problem, limits: Limits, rounds: int) -> None:
    effort = RecheckEffort()
    scan_s, recheck_s = [], []
    for _ in range(rounds + 1):  # the first one compiles
        start = time.process_time()
        found = scan(problem, 0, limits, ROUNDS * effort.num_simulated)
        middle = time.process_time()
        seen = recheck(described(problem, 0, found.fitting)[: effort.num_simulated], effort)
        scan_s.append(middle - start)
        recheck_s.append(time.process_time() - middle)
    winner = compare_configs(replace(problem, limits=limits)).winner
    print(
        f"{problem.work_name} on {problem.cluster.name}: {found.num_configs:,} configs, "
        f"{found.num_fitting:,} fit; scan {min(scan_s[1:]):.2f} s, "
        f"recheck of {len(seen)} {min(recheck_s[1:]):.2f} s"
    )
    if winner is not None:
        mfu = forecast_of(problem, winner).mfu
        print(f"  {winner.planner}: step {winner.step_s:.3f} s, MFU {mfu:.1%}")


if __name__ == "__main__":
    main()
