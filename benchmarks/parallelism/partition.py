"""How long dividing layers over stages takes, and what comes out.

    .venv/bin/python benchmarks/parallelism/partition.py

Seconds are CPU seconds of one core, after compiling, the least of three.
Results: ``docs/concepts/parallelism_partition.md``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from hocket.planners.parallel.partition import LayerCosts, partition_layers

GIB = 2.0**30
_T = TypeVar("_T")


def timed(work: Callable[[], _T]) -> tuple[_T, float]:
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        result = work()
        seconds.append(time.process_time() - begin)
    return result, min(seconds)


def transformer(num_layers: int, num_ways: int) -> LayerCosts:
    """Equal layers between an embedding and an output layer, on a fast and a slow device kind."""
    count = num_layers + 2
    forward_s = np.full((count, 2), 1.0) * [1.0, 0.6]
    forward_s[0] *= 0.1
    forward_s[-1] *= 1.7
    backward_s = np.stack([2.0 * forward_s, 2.1 * forward_s, 3.0 * forward_s])[:num_ways]
    kept = np.array([600, 340, 20])[:num_ways, None]
    return LayerCosts(
        forward_s=forward_s,
        backward_s=backward_s,
        activation_bytes=np.repeat(kept, count, axis=1),
        state_bytes=np.full(count, 3000),
        send_s=np.full(count, 0.01),
        counts=np.array([False, *[True] * num_layers, False]),
    )


def layers_table() -> None:
    print("\n| layers | ranks | stages per rank | ways | order | step | s |\n|" + "---|" * 7)
    cases = [
        (96, 16, 1, 1, False), (128, 64, 1, 1, False), (128, 64, 1, 3, False),
        (96, 16, 1, 3, True), (128, 64, 1, 1, True), (96, 16, 6, 1, False), (128, 64, 2, 1, False),
    ]  # fmt: skip
    for num_layers, num_ranks, num_chunks, num_ways, reorder in cases:
        costs, num_stages = transformer(num_layers, num_ways), num_ranks * num_chunks
        memory = 45_000 if num_ways > 1 else 10**9
        found, seconds = timed(
            partial(
                partition_layers,
                costs,
                kinds=[0] * (num_ranks // 2) + [1] * (num_ranks - num_ranks // 2),
                memory_bytes=[memory, memory],
                in_flight=[max(1, num_ranks - i % num_ranks) for i in range(num_stages)],
                num_microbatches=256,
                rank_of_stage=[i % num_ranks for i in range(num_stages)],
                reorder=reorder,
            )
        )
        order = "any" if reorder else "given"
        print(
            f"| {num_layers} | {num_ranks} | {num_chunks} | {num_ways} | {order} "
            f"| {found.step_s:.2f} | {seconds:.3f} |",
            flush=True,
        )


def main() -> None:
    layers_table()


if __name__ == "__main__":
    main()
