"""Budgets kept on a processor: many pairs of model and budget, each trained under the ledger.

    PYTHONPATH=src:tests python benchmarks/memory/pairs.py [--pairs 200]

For each small model of ``tests/runtime/budget_models.py`` budgets from the plain peak down to the
leanest plan. A pair is broken where the counted peak exceeds the budget or is not the rehearsed
one. One line per model, and the sums.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from runtime.budget_models import MODELS
from runtime.train_loops import adamw

import hocket
from hocket.base.errors import NoFeasiblePlanError
from hocket.runtime.memory.ledger import Ledger


def trained(name: str, budget_bytes: int) -> tuple[int, int]:
    """Rehearsed and counted peak of two steps within a budget."""
    torch.manual_seed(0)
    model, batches, forward = MODELS[name]()
    train: Any = hocket.prepare(
        model, adamw(model), batches[0], forward=forward, memory=budget_bytes
    )
    ledger = Ledger()
    with ledger:
        ledger.hold(train._carrier.lasting)
        ledger.hold(batches[0])
        for _ in range(2):
            train.step(batches[0])
    return train.memory.peak_bytes, ledger.peak_bytes


def main() -> None:
    """All pairs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=200)
    per_model = -(-parser.parse_args().pairs // len(MODELS))
    total = broken = 0
    for name in MODELS:
        plain, _ = trained(name, 2**40)
        try:
            trained(name, 1)
            leanest = plain
        except NoFeasiblePlanError as error:
            leanest = int(str(error.hint).split("memory=")[1].split(",")[0])
        low, high = sorted((leanest, plain))
        wrong = 0
        for budget in np.linspace(low, high, per_model).astype(int).tolist():
            rehearsed, counted = trained(name, budget)
            wrong += counted > budget or counted != rehearsed
        print(f"| {name} | {plain} | {leanest} | {per_model} | {wrong} |", flush=True)
        total, broken = total + per_model, broken + wrong
    print(f"{total} pairs, {broken} broken")


if __name__ == "__main__":
    main()
