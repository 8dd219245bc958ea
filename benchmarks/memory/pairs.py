"""Budgets kept on a processor: many pairs of model and budget, each trained under the ledger.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/memory/pairs.py [--pairs 200] [--only TEXT]

The models of the zoo at toy size (``tests/runtime/small_zoo.py``) and those of
``tests/runtime/budget_models.py``; budgets evenly from the leanest plan's peak up to the plain
step's. A model is recorded and its plans are made once; each pair is then chosen as
``hocket.prepare(memory=)`` chooses, and trained for two steps with every storage counted. A pair
is broken where the counted peak is above the budget or is not exactly the predicted one, where the
predicted step is longer than that of a smaller budget, or where full checkpointing keeps the
budget and is predicted to be faster. Times are predictions for one H200.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from runtime.budget_models import MODELS
from runtime.small_zoo import SMALL_ZOO
from runtime.train_loops import adamw

from hocket.api import find_cluster, plan_graph
from hocket.base.errors import NoFeasiblePlanError
from hocket.capture import CaptureWarning
from hocket.plan.sections import Memory
from hocket.planners.memory.frontier import FULL_RECOMPUTE, Frontier, find_frontier
from hocket.planners.registry import ONE_DEVICE
from hocket.runtime.memory.ledger import Ledger
from hocket.runtime.memory.rounding import rounded_parameters
from hocket.runtime.train.budgeted import Budgeted
from hocket.runtime.train.fitting import KeptBudget, fitted
from hocket.runtime.train.loop import LoopOptions, TrainingLoop
from hocket.runtime.train.recorded import Recipe
from hocket.runtime.train.rehearsal import rehearsed_peak_bytes
from hocket.runtime.train.update import planned_update

CPU = torch.device("cpu")
ZOO = ("mlp", "lstm", "moe-12x32", "wide-resnet", "resnet101", "gpt2", "bert-large", "llama-1b",
       "vit-base", "gnmt-4", "mixtral-small", "t5-base")  # fmt: skip
"""One of each kind; the others differ in depth."""


@dataclass(eq=False)
class Case:
    """A model with its plans, and what each was rehearsed to hold."""

    model: Any
    batch: Any
    forward: Callable[..., Any] | None

    def __post_init__(self) -> None:
        optimizer = adamw(self.model)
        update = planned_update(optimizer, self.model)
        self.recipe = Recipe(update=update, device="cpu", forward=self.forward)
        self.graph, program = self.recipe.trace(self.model, self.batch, "train")
        self.rounded = rounded_parameters(program)
        planned = plan_graph(self.graph, find_cluster("1xh200"), planners=ONE_DEVICE)
        self.frontier: Frontier = find_frontier(planned.problem, planned.plan)
        self.rehearsed: dict[Any, int] = {}

    def rehearse(self, section: Memory) -> int:
        """The predicted peak of a plan."""
        key = section.blocks, section.loss_chunks
        if key not in self.rehearsed:
            self.rehearsed[key] = rehearsed_peak_bytes(
                self.model, adamw(self.model), self.batch, self.recipe, section, CPU,
                graph=self.graph, rounded=self.rounded,
            )  # fmt: skip
        return self.rehearsed[key]

    def counted(self, kept: KeptBudget) -> int:
        """The most that two steps held."""
        model = copy.deepcopy(self.model)
        carrier = Budgeted(
            model, self.batch, self.recipe, kept, CPU, graph=self.graph, rounded=self.rounded
        )
        train = TrainingLoop(model, adamw(model), carrier, LoopOptions())
        ledger = Ledger()
        with ledger:
            ledger.hold(carrier.lasting)
            ledger.hold(leaf for leaf in leaves(self.batch) if isinstance(leaf, torch.Tensor))
            for _ in range(2):
                train.step(self.batch)
        return ledger.peak_bytes


def leaves(batch: Any) -> list[Any]:
    """The tensors of a batch."""
    return torch.utils._pytree.tree_leaves(
        dict(batch) if hasattr(batch, "keys") and not isinstance(batch, dict) else batch
    )


def row(name: str, case: Case, num_budgets: int, started: float) -> tuple[int, int]:
    """All budgets of a model; returns pairs and broken ones."""
    plain = fitted(2**60, case.frontier, case.rehearse)
    try:
        leanest = fitted(1, case.frontier, case.rehearse).peak_bytes
    except NoFeasiblePlanError as error:
        leanest = int(str(error.hint).split("memory=")[1].split(",")[0])
    assert plain.peak_bytes is not None
    full = case.frontier.find(FULL_RECOMPUTE)
    full_peak = case.rehearse(full.memory)
    wrong: dict[str, int] = dict.fromkeys(("over", "not as predicted", "slower", "beaten"), 0)
    last_s, slowest, sections = float("inf"), 0.0, set()
    for budget in np.linspace(leanest, plain.peak_bytes, num_budgets).astype(int).tolist():
        kept = fitted(budget, case.frontier, case.rehearse)
        counted = case.counted(kept)
        wrong["over"] += counted > budget
        wrong["not as predicted"] += counted != kept.peak_bytes
        wrong["slower"] += kept.step_s > last_s
        wrong["beaten"] += full_peak <= budget and full.step_s < kept.step_s
        last_s = kept.step_s
        slowest = max(slowest, kept.step_s / plain.step_s)
        sections.add((kept.section.blocks, kept.section.loss_chunks))
    told = ", ".join(f"{count} {what}" for what, count in wrong.items() if count) or "0"
    print(
        f"| {name} | {case.graph.num_ops:,} | {case.frontier.uses.blocks.num_blocks} | "
        f"{plain.peak_bytes:,} | {leanest:,} | {slowest:.2f} | {len(sections)} | {num_budgets} | "
        f"{told} | {time.process_time() - started:.0f} |",
        flush=True,
    )
    return num_budgets, sum(wrong.values())


def cases() -> dict[str, Callable[[], Case]]:
    """All models by name."""
    made: dict[str, Callable[[], Case]] = {}
    for name in ZOO:
        build = SMALL_ZOO[name]
        made[name] = lambda build=build: Case(*build(), None)
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
