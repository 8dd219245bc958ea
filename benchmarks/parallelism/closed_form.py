"""The closed form of captured ops beside their simulation, for the best of each family.

    python benchmarks/parallelism/closed_form.py [--models gpt2-medium,llama-1b]

The closed form chooses what is simulated; an answer is always a simulated step. A row is the
parallel section with the shortest estimate of its family (data, pipeline, tensor). FSDP has no
closed form: its few candidates are all simulated.
"""

from __future__ import annotations

import argparse

from same_answer import CONFIGURATIONS

from hocket.cli.sources import ModelOptions, load_graph
from hocket.plan.make import make_problem
from hocket.plan.words import in_words
from hocket.planners.devices import workers
from hocket.planners.parallel.closed_form import tables_of
from hocket.planners.parallel.search import Estimate, _estimates
from hocket.simulate.engine import simulate_parallel


def main() -> None:
    """Print one line per configuration and family, and how many are within 3 %."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(row[0] for row in CONFIGURATIONS))
    models = parser.parse_args().models.split(",")
    ratios: list[float] = []
    for model, on, batch, seq in CONFIGURATIONS:
        if model not in models:
            continue
        options = ModelOptions(batch=batch, seq=seq, dtype=None, optimizer=None, amp="bf16")
        problem = make_problem(load_graph(model, options, check=False)[0], on)
        best: dict[object, Estimate] = {}
        tables, devices = tables_of(problem), workers(problem).tolist()
        found = _estimates(tables, devices, takes_all=False)
        for estimate in sorted(found, key=lambda each: each.seconds):
            best.setdefault(estimate.family, estimate)
        for estimate in best.values():
            step_s = simulate_parallel(problem, estimate.parallel)[1].makespan_s
            ratios.append(estimate.seconds / step_s)
            print(
                f"{model:12s} {on:14s} closed form {estimate.seconds * 1e3:9.2f} ms, "
                f"simulated {step_s * 1e3:9.2f} ms, {ratios[-1]:.3f}  "
                f"{in_words(estimate.parallel)[:80]}",
                flush=True,
            )
    near = sum(abs(ratio - 1) <= 0.03 for ratio in ratios)
    print(f"{near} of {len(ratios)} within 3 %, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
