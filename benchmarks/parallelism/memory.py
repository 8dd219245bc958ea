"""Time of `hocket.cost.parallel.memory` on millions of configs: CPU seconds on one core.

.venv/bin/python benchmarks/parallelism/memory.py [MILLIONS]
"""

import sys
import time

import numpy as np

from hocket.cost.parallel.memory import memory
from hocket.cost.parallel.softwares import find_software
from hocket.transformer import SCHEDULES, ParallelConfigs
from hocket.transformer.files import find_model


def grid(num_configs: int) -> ParallelConfigs:
    """ParallelConfigs in the order of nested loops, as a search makes them."""
    sizes = {
        "tensor": [1, 2, 4, 8], "pipeline": [1, 2, 4, 8, 16, 32], "data": [1, 2, 4, 8, 16],
        "chunks": [1, 2, 3], "microbatch": [1, 2, 4, 8], "schedule": range(len(SCHEDULES)),
        "recompute": range(3), "zero": range(4), "sequence_parallel": [False, True],
    }  # fmt: skip
    axes = np.meshgrid(*sizes.values(), indexing="ij")
    num = axes[0].size
    index = np.arange(num_configs) % num
    columns = {key: axis.ravel()[index] for key, axis in zip(sizes, axes, strict=True)}
    small = {key: columns[key].astype(np.int8) for key in ("schedule", "recompute", "zero")}
    along = columns["sequence_parallel"].astype(bool)
    names = ("tensor", "pipeline", "data", "chunks", "microbatch")
    ints = {key: columns[key].astype(np.int32) for key in names}
    ones = np.ones(num_configs, np.int32)
    return ParallelConfigs(
        **ints, **small, sequence_parallel=along, context=ones, expert=ones,
        global_batch=1536 * ones,
    )  # fmt: skip


def main() -> None:
    millions = float(sys.argv[1]) if len(sys.argv) > 1 else 5.0
    configs = grid(int(millions * 1e6))
    software = find_software("megatron-core")
    for name in ("gpt3-175b", "mixtral-8x7b"):
        model = find_model(name)
        memory(model, configs.take(np.arange(10)), software)
        start_s = time.process_time()
        memory(model, configs, software)
        spent_s = time.process_time() - start_s
        print(f"{name}: {len(configs):,} configs in {spent_s:.3f} CPU s")


if __name__ == "__main__":
    main()
