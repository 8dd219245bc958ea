"""All models of the zoo and ten as people write them: 20 steps of a loop equal plain PyTorch.

    PYTHONPATH=src:tests python benchmarks/runtime/train_equality.py [--steps 20] [--only NAME]
    PYTHONPATH=src:tests python benchmarks/runtime/train_equality.py --divided

Each trains on a random placement of single ops over three devices of this process, with gradients
accumulated over two batches, clipped, a schedule, two groups of parameters, and a checkpoint
that is loaded under another random placement in the middle. Prints one line per model; losses,
weights and buffers have to be equal bit for bit. With ``--divided`` the configs and shares of
`tests/runtime/divided_ranks.py` train on 2 and 4 processes beside one, in double precision: the
largest difference of losses, weights and states has to be under 1e-6.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import torch
from runtime.divided_ranks import CASES, PARTS, differences, write_plans
from runtime.small_zoo import SMALL_ZOO
from runtime.train_loops import adamw, compare_loops, random_plan
from runtime.train_models import USER_MODELS

from hocket.capture import CaptureWarning
from hocket.training import prepare
from hocket.transformer import ParallelConfig

_TOLERANCE = 1e-6


def zoo(name: str) -> Callable[[], Any]:
    """A model of the zoo as the user models are given."""

    def build() -> Any:
        model, batch = SMALL_ZOO[name]()
        return model, [batch], None

    return build


def resumed(build: Callable[[], Any], folder: str) -> Callable[[Any], Any]:
    """Saves a loop and goes on with a fresh model on another placement."""

    def go_on(train: Any) -> Any:
        path = train.save(folder)
        scheduled = train.optimizer
        torch.manual_seed(99)
        model, batches, forward = build()
        optimizer = adamw(model)
        plan = random_plan(model, optimizer, batches[0], 77, forward)
        other = prepare(
            model, optimizer, batches[0], plan=plan, forward=forward,
            accumulate=train.options.accumulate, clip_norm=train.options.clip_norm,
        )  # fmt: skip
        other.load(path)
        # The schedule goes on with the optimizer that it was made for.
        scheduled.param_groups = optimizer.param_groups
        return other

    return go_on


def divided(steps: int) -> int:
    """Compare configs with one process; how many differ."""
    num_wrong = 0
    for name, (_, config) in CASES.items():
        if isinstance(config, ParallelConfig):
            num_ranks = config.num_devices
        else:
            num_ranks = sum(len(cuts) + 1 for cuts, _ in config) if config else 2
            num_ranks *= PARTS.get(name, 1)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            write_plans(Path(folder), [name])
            found = forked.answers(num_ranks, differences, Path(folder), [name], steps)
        worst = max(rank[name][what] for rank in found for what in ("loss", "weights", "states"))
        num_wrong += not worst < _TOLERANCE
        took_s = time.perf_counter() - began
        print(f"{name:24} {num_ranks} ranks {worst:8.1e} {took_s:7.1f} s", flush=True)
    return num_wrong


def main() -> None:
    """Compare, one line per model."""
    models = {**{name: zoo(name) for name in SMALL_ZOO}, **USER_MODELS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=models, action="append")
    parser.add_argument("--divided", action="store_true")
    arguments = parser.parse_args()
    if arguments.divided:
        raise SystemExit(divided(arguments.steps))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", CaptureWarning)
    num_wrong = 0
    for name in arguments.only or models:
        began = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            try:
                compare_loops(
                    models[name], seed=len(name), steps=arguments.steps,
                    halfway=resumed(models[name], folder),
                )  # fmt: skip
                result = "equal"
            except AssertionError as error:
                num_wrong += 1
                result = f"DIFFERENT: {str(error).splitlines()[0][:80]}"
        print(f"{name:16} {result}  ({time.process_time() - began:.1f} s of CPU)", flush=True)
    raise SystemExit(num_wrong > 0)


if __name__ == "__main__":
    main()
