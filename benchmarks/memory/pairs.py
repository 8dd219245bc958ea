"""Budgets kept on a processor: many pairs of model and budget, each trained under the ledger.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/memory/pairs.py [--pairs 200] [--only TEXT]

The models of the zoo at toy size (``tests/runtime/small_zoo.py``) and those of
``tests/runtime/budget_models.py``; budgets evenly from the leanest plan's peak up to the plain
step's. Each pair is trained for three steps with every storage counted. A pair is broken where the
counted peak is above the budget or is not exactly the predicted one, where the predicted step is
longer than that of a smaller budget, or where full checkpointing keeps the budget and is predicted
to be faster. Times are predictions for one H200.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable

import torch
from budget_case import Case
from runtime.budget_models import MODELS
from runtime.small_zoo import SMALL_ZOO

from hocket.capture import CaptureWarning

ZOO = ("mlp", "lstm", "moe-12x32", "wide-resnet", "resnet101", "gpt2", "bert-large", "llama-1b",
       "vit-base", "gnmt-4", "mixtral-small", "t5-base")  # fmt: skip
"""One of each kind; the others differ in depth."""


def row(name: str, case: Case, num_budgets: int, started: float) -> tuple[int, int]:
    """All budgets of a model; returns pairs and broken ones."""
    budgets = case.budgets(num_budgets)
    full_peak, full_s = case.full_recompute()
    wrong: dict[str, int] = dict.fromkeys(("over", "not as predicted", "slower", "beaten"), 0)
    times, plans = [], set()
    for budget in budgets:
        kept = case.chosen(budget)
        counted = case.counted(kept)
        assert kept.step_s is not None
        wrong["over"] += counted > budget
        wrong["not as predicted"] += counted != kept.peak_bytes
        wrong["slower"] += bool(times) and kept.step_s > times[-1]
        wrong["beaten"] += full_peak <= budget and full_s < kept.step_s
        times.append(kept.step_s)
        plans.add((kept.section.blocks, kept.section.loss_chunks))
    told = ", ".join(f"{count} {what}" for what, count in wrong.items() if count) or "0"
    print(
        f"| {name} | {case.graph.num_ops:,} | {case.frontier.uses.blocks.num_blocks} | "
        f"{budgets[-1]:,} | {budgets[0]:,} | {times[0] / times[-1]:.2f} | {len(plans)} | "
        f"{num_budgets} | {told} | {time.process_time() - started:.0f} |",
        flush=True,
    )
    return num_budgets, sum(wrong.values())


def cases() -> dict[str, Callable[[], Case]]:
    """All models by name."""
    made: dict[str, Callable[[], Case]] = {}
    for name in ZOO:
        made[name] = lambda build=SMALL_ZOO[name]: Case(*build(), None)
    for name, build in MODELS.items():
        made[f"own {name}"] = lambda build=build: Case(
            *(lambda model, batches, forward: (model, batches[0], forward))(*build())
        )
    return made


def main() -> int:
    """All pairs; exit code 6 where one is broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore", CaptureWarning)
    torch.set_num_threads(1)
    made = cases()
    per_model = -(-options.pairs // len(made))
    print("| model | ops | blocks | plain bytes | leanest | slowest step, plain steps | plans | "
          "pairs | broken | CPU s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    total = broken = 0
    for name, build in made.items():
        if options.only in name:
            torch.manual_seed(0)
            started = time.process_time()
            pairs, wrong = row(name, build(), per_model, started)
            total, broken = total + pairs, broken + wrong
    print(f"{total} pairs, {broken} broken")
    return 6 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
