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

from hocket.planners.parallel.layer_partition import (
    LayerCosts,
    PipelineRanks,
    partition_layers,
)

GIB = 2.0**30
_T = TypeVar("_T")


def timed(work: Callable[[], _T]) -> tuple[_T, float]:
    seconds = []
    for _ in range(3):
        begin = time.process_time()
        result = work()
        seconds.append(time.process_time() - begin)
    return result, min(seconds)


def transformer(num_layers: int) -> LayerCosts:
    """Equal layers between an embedding and an output layer, on a fast and a slow device kind."""
    count = num_layers + 2
    forward_s = np.full((count, 2), 1.0) * [1.0, 0.6]
    forward_s[0] *= 0.1
    forward_s[-1] *= 1.7
    return LayerCosts(
        forward_s=forward_s,
        backward_s=2.0 * forward_s,
        activation_bytes=np.full(count, 600),
        state_bytes=np.full(count, 3000),
        send_s=np.full(count, 0.01),
        counts=np.array([False, *[True] * num_layers, False]),
    )


def layers_table() -> None:
    print("\n| layers | ranks | stages per rank | order | step | s |\n|" + "---|" * 6)
    cases = [
        (96, 16, 1, False), (128, 64, 1, False), (128, 64, 1, True), (96, 16, 6, False),
        (128, 64, 2, False),
    ]  # fmt: skip
    for num_layers, num_ranks, num_chunks, reorder in cases:
        costs, num_stages = transformer(num_layers), num_ranks * num_chunks
        ranks = PipelineRanks(
            device_types=[0] * (num_ranks // 2) + [1] * (num_ranks - num_ranks // 2),
            memory_bytes=[10**9, 10**9],
            in_flight=[max(1, num_ranks - i % num_ranks) for i in range(num_stages)],
            num_microbatches=256,
            rank_of_stage=tuple(i % num_ranks for i in range(num_stages)),
        )
        found, seconds = timed(partial(partition_layers, costs, ranks, reorder=reorder))
        order = "any" if reorder else "given"
        print(
            f"| {num_layers} | {num_ranks} | {num_chunks} | {order} "
            f"| {found.step_s:.2f} | {seconds:.3f} |",
            flush=True,
        )


def main() -> None:
    layers_table()


if __name__ == "__main__":
    main()
