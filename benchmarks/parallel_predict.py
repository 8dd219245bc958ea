"""CPU time of the step predictor over millions of divisions of GPT-3 175B on 4096 GPUs.

python benchmarks/parallel_predict.py [MILLIONS]
"""

from __future__ import annotations

import sys
import time

import numpy as np

from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.step import predict
from hocket.hardware.shorthand import cluster_from_text
from hocket.transformer import RECOMPUTES, SCHEDULES, Divisions
from hocket.transformer.files import find_model

NUM_DEVICES, BATCH = 4096, 1536


def divisions(count: int) -> Divisions:
    """``count`` divisions over all devices, every field varied; not all of them are sensible."""
    random = np.random.default_rng(0)
    tensor = 2 ** random.integers(0, 4, count, dtype=np.int32)
    context = 2 ** random.integers(0, 4, count, dtype=np.int32)
    pipeline = 2 ** random.integers(0, 6, count, dtype=np.int32)
    data = NUM_DEVICES // (tensor * context * pipeline)
    return Divisions(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data.astype(np.int32),
        expert=np.ones(count, dtype=np.int32),
        chunks=random.integers(1, 9, count, dtype=np.int32),
        microbatch=random.integers(1, 17, count, dtype=np.int32),
        global_batch=np.full(count, BATCH, dtype=np.int32),
        schedule=random.integers(0, len(SCHEDULES), count, dtype=np.int8),
        recompute=random.integers(0, len(RECOMPUTES), count, dtype=np.int8),
        zero=random.integers(0, 4, count, dtype=np.int8),
        sequence_parallel=random.integers(0, 2, count, dtype=np.int8).astype(np.bool_),
    )


def main(millions: float) -> None:
    """Time three passes and say what they took."""
    asked = divisions(round(millions * 1e6))
    model, software = find_model("gpt3-175b"), find_software("megatron-core")
    cluster = cluster_from_text("512xdgx-a100-80g")
    for _ in range(3):
        start_s = time.process_time()
        predict(model, asked, cluster, software)
        taken_s = time.process_time() - start_s
        sys.stdout.write(f"{len(asked)} divisions: {taken_s:.3f} s of CPU\n")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0)
