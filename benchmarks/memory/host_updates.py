"""What updates on the host cost a step within a budget: by threads, and without any updates.

    PYTHONPATH=src:benchmarks/memory python benchmarks/memory/host_updates.py LAYERS BUDGET

A GPT of width 3072 with 16,384 tokens a step is prepared once; then steps are timed with other
numbers of threads for the updates, and with no updates at all (whose numbers are wrong). Beside the
seconds of a step: those in which the updates' thread updates, how fast, and those in which the
thread of the forward pass waits for it.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from typing import Any

os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from gpu_models import Sizes, forward, gpt, word_batch
from gpu_rows import HostClock, synchronize
from gpu_systems import adamw

import hocket
from hocket.runtime.memory import home_step
from hocket.runtime.memory.updates import HostUpdates

STEPS = 4
SPENT: dict[str, float] = {}


def clocked(owner: type, name: str) -> None:
    """Count the seconds of a method."""
    inner = getattr(owner, name)

    def method(self: Any, *args: Any) -> Any:
        start = time.perf_counter()
        result = inner(self, *args)
        SPENT[name] = SPENT.get(name, 0.0) + time.perf_counter() - start
        return result

    setattr(owner, name, method)


def steps(label: str, train: Any, batch: Any) -> None:
    """A line for some steps."""
    SPENT.clear()
    took = []
    with HostClock() as clock:
        for _ in range(STEPS):
            synchronize()
            start = time.perf_counter()
            float(train.step(batch))
            synchronize()
            took.append(f"{time.perf_counter() - start:.3f}")
    spent = {name: round(seconds / STEPS, 3) for name, seconds in SPENT.items()}
    spent |= {name: round(value, 3) for name, value in clock.told(STEPS).items()}
    print(f"{label}: {' '.join(took)} s, {spent}", flush=True)


def use_threads(train: Any, count: int) -> None:
    """Have the updates' thread take so many."""
    block = train._carrier.blocks[0]
    train._carrier._updates.ask(block, lambda: torch.set_num_threads(count))
    train._carrier._updates.wait(block)


def main() -> None:
    """All lines."""
    warnings.simplefilter("ignore")
    clocked(HostUpdates, "wait")
    sizes = Sizes()
    model, batch = gpt(3072, int(sys.argv[1]), sizes, "cpu"), word_batch(sizes)
    train = hocket.prepare(model, adamw(model), batch, forward=forward, memory=sys.argv[2])
    assert train.memory is not None
    print(f"predicted {train.memory.step_s:.3f} s", flush=True)
    steps("first", train, batch)
    steps("as it is", train, batch)
    cores = os.cpu_count() or 1
    for count in (cores - 2, cores - 1, cores):
        use_threads(train, max(1, count))
        steps(f"{count} threads", train, batch)
    home_step._step = lambda block, part, chosen: None
    steps("no updates", train, batch)


if __name__ == "__main__":
    main()
