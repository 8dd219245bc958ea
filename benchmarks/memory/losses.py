"""A hundred steps within a budget beside plain PyTorch, on a processor: how far losses part.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/memory/losses.py [--steps 100]

The models of ``tests/runtime/budget_models.py`` under half of the way from the leanest plan to the
plain step, by ``hocket.prepare(memory=)``; once as they are, once with gradients of two batches
added up and clipped by their norm. Printed are the worst relative difference of a loss, and how
many losses are not the same bits.
"""

from __future__ import annotations

import argparse
import copy
import warnings

import torch
from budget_case import Case
from runtime.budget_models import MODELS
from runtime.train_loops import adamw, plain_steps

import hocket
from hocket.base.errors import NoFeasiblePlanError
from hocket.capture import CaptureWarning

WAYS = {"plain": {}, "clipped, 2 batches": {"accumulate": 2, "clip_norm": 0.3}}


def main() -> None:
    """A line per model and way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    warnings.simplefilter("ignore", CaptureWarning)
    torch.set_num_threads(1)
    print("| model | way | budget / plain | chunks | worst difference | other bits |")
    print("|---|---|---|---|---|---|")
    for name, build in MODELS.items():
        torch.manual_seed(0)
        model, batches, forward = build()
        _, budget, plain = Case(copy.deepcopy(model), batches[0], forward).budgets(3)
        batches = [batches[number % len(batches)] for number in range(steps)]
        for way, options in WAYS.items():
            mine, twin = copy.deepcopy(model), copy.deepcopy(model)
            try:
                train = hocket.prepare(
                    mine, adamw(mine), batches[0], forward=forward, memory=budget, on="1xh200",
                    **options,
                )  # fmt: skip
            except NoFeasiblePlanError as error:
                # Gradients that are added up stay between batches.
                print(f"| {name} | {way} | {budget / plain:.2f} | – | refused: {error.message} | |")
                continue
            torch.manual_seed(1)
            ours = [train.step(batch).item() for batch in batches]
            torch.manual_seed(1)
            theirs = plain_steps(twin, adamw(twin), batches, forward=forward, **options)
            pairs = list(zip(ours, theirs, strict=True))
            worst = max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
            print(
                f"| {name} | {way} | {budget / plain:.2f} | {train.memory.section.loss_chunks} | "
                f"{worst:.1e} | {sum(a != b for a, b in pairs)} of {steps} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
