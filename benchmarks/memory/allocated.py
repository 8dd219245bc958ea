"""Rehearsed peaks beside what the allocator gives on a processor, without any dispatch mode.

    PYTHONPATH=src:tests .venv/bin/python benchmarks/memory/allocated.py [--only TEXT]

The models of ``pairs.py`` and, at toy size, those that ``h200.py`` trains, each under its leanest
plan and under none. Three steps are noted event by event (`allocations`). A row is off where the
allocator gave another number of bytes than was rehearsed, temporaries inside of ops apart (they are
told beside it) and but for the optimizer's counters of steps, four bytes each. What is computed
again is broken off inside its last op, whose result looks like a temporary: where that makes the
peak, up to a ten-thousandth is missing.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from allocations import Allocations, allocations
from budget_case import Case
from gpu_models import DeepResNet, Sizes, drawn, forward, gpt, plain_forward, word_batch
from pairs import cases
from torch.utils._pytree import tree_leaves

from hocket.capture import CaptureWarning
from hocket.plan.sections import Memory
from hocket.runtime.offload.plan_choice import BudgetPlan

TINY = Sizes(sequence=32, vocabulary=2048, tokens=128)
"""Words enough that the sum of the embedding's two gradients is a peak."""
COUNTER_BYTES = 4
SLACK = 1e-4


def gpu_cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """What pairs of model and budget are made of on a GPU."""
    images = lambda: (torch.randn(2, 3, 28, 28), torch.randint(1000, (2,)))  # noqa: E731
    experts = {"num_experts": 4, "hidden": 64}
    for told, loss_of in (("", forward), (", float32", plain_forward)):
        yield f"gpt{told}", lambda f=loss_of: Case(gpt(64, 6, TINY, "cpu"), word_batch(TINY), f)
        yield (
            f"wide gpt{told}",
            lambda f=loss_of: Case(gpt(128, 2, TINY, "cpu"), word_batch(TINY), f),
        )
        yield (
            f"experts{told}",
            lambda f=loss_of: Case(gpt(64, 3, TINY, "cpu", **experts), word_batch(TINY), f),
        )
    yield (
        "resnet, float32",
        lambda: Case(drawn(DeepResNet(27, 28, 64), "cpu"), images(), plain_forward),
    )


def noted(case: Case, section: Memory) -> Allocations:
    """What three steps of a model under a plan allocate."""
    model = copy.deepcopy(case.model)
    train = case.loop(model, BudgetPlan(section, 0))
    batch = dict(case.batch) if hasattr(case.batch, "keys") else case.batch
    held = [*train._strategy.lasting, *tree_leaves(batch)]

    def steps() -> None:
        for _ in range(3):
            float(train.step(case.batch))
        train.state_dict()

    return allocations(steps, case.device, [t for t in held if isinstance(t, torch.Tensor)])


def row(name: str, case: Case) -> int:
    """Print both plans of a model; returns how many are off."""
    wrong, counters = 0, COUNTER_BYTES * len(list(case.model.parameters()))
    plans = {
        "leanest": case.frontier.smallest.memory,
        "none": Memory(budget_bytes=(2**60,), blocks=()),
    }
    for told, section in plans.items():
        if section is None:
            continue
        rehearsed = case.dry_run(section)
        found = noted(case, section)
        seen, most = (found.peak(with_temporaries=each) for each in (False, True))
        is_off = not -SLACK * rehearsed <= seen.held_bytes - rehearsed <= counters
        wrong += is_off
        print(
            f"| {name} | {told} | {rehearsed:,} | {seen.held_bytes:,} | "
            f"{most.held_bytes - seen.held_bytes:,} | {seen.phase}: {seen.op} | "
            f"{'**off**' if is_off else ''} |",
            flush=True,
        )
    return wrong


def main() -> int:
    """All models; exit code 6 where a row is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore", CaptureWarning)
    torch.set_num_threads(1)
    print("| model | plan | rehearsed | allocated | temporaries on top | peak | |")
    print("|---|---|---|---|---|---|---|")
    wrong = 0
    for name, build in chain(cases().items(), gpu_cases()):
        if options.only in name:
            torch.manual_seed(0)
            wrong += row(name, build())
    print(f"{wrong} off")
    return 6 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
