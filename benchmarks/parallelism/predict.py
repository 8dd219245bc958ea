"""CPU time of the step predictor over millions of configs of GPT-3 175B on 4096 GPUs.

python benchmarks/parallelism/predict.py [MILLIONS]
"""

from __future__ import annotations

import sys
import time

import numpy as np

from hocket.cost.parallel.calibrate import calibrate, prediction_errors
from hocket.cost.parallel.coefficients import Coefficients
from hocket.cost.parallel.measured_runs import MeasuredRun
from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.step import predict
from hocket.cost.validation import load_tables, site_cluster
from hocket.hardware.cluster import Cluster
from hocket.hardware.shorthand import cluster_from_text
from hocket.transformer import RECOMPUTES, SCHEDULES, ParallelConfigs
from hocket.transformer.files import find_model

NUM_DEVICES, BATCH = 4096, 1536


def configs(count: int) -> ParallelConfigs:
    """``count`` configs over all devices, every field varied; not all of them are sensible."""
    random = np.random.default_rng(0)
    tensor = 2 ** random.integers(0, 4, count, dtype=np.int32)
    context = 2 ** random.integers(0, 4, count, dtype=np.int32)
    pipeline = 2 ** random.integers(0, 6, count, dtype=np.int32)
    data = NUM_DEVICES // (tensor * context * pipeline)
    return ParallelConfigs(
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


def draws(data: str, count: int) -> None:
    """Errors of the runs that were not among ten random ones, over many choices of the ten."""
    tables = load_tables(data)
    selene = ("sc21-table1", "sc21-table2", "korthikanti-table5")
    tables["selene"] = [row for name in selene for row in tables[name]]
    for name in ("selene", "vtrain-multi", "vtrain-single", "bloom"):
        rows = [row for row in tables[name] if row.step_s is not None]
        cluster = site_cluster(rows[0].cluster, max(row.config.num_devices for row in rows))
        zero_shot = np.abs(prediction_errors(rows, cluster, Coefficients()))
        found = np.array([_left_out(rows, cluster, seed) for seed in range(count)])
        (mean, high), (worst, worst_high) = found.mean(axis=0), found.max(axis=0)
        sys.stdout.write(
            f"{name:<14} zero-shot {zero_shot.mean():6.1%} p95 {np.quantile(zero_shot, 0.95):6.1%}"
            f" | {count} draws: mean {mean:6.1%} p95 {high:6.1%}"
            f", worst {worst:6.1%} p95 {worst_high:6.1%}\n"
        )


def _left_out(rows: list[MeasuredRun], cluster: Cluster, seed: int) -> tuple[float, float]:
    order = np.random.default_rng(seed).permutation(len(rows))
    fitted = calibrate([rows[i] for i in order[:10]], cluster)
    sizes = np.abs(prediction_errors([rows[i] for i in order[10:]], cluster, fitted))
    return float(sizes.mean()), float(np.quantile(sizes, 0.95))


def speed(millions: float) -> None:
    """Time three passes and say what they took; the first one may compile."""
    asked = configs(round(millions * 1e6))
    model, software = find_model("gpt3-175b"), find_software("megatron-core")
    cluster = cluster_from_text("512xdgx-a100-80g")
    for _ in range(3):
        start_s = time.process_time()
        predict(model, asked, cluster, software)
        taken_s = time.process_time() - start_s
        sys.stdout.write(f"{len(asked)} configs: {taken_s:.3f} s of CPU\n")


def main(arguments: list[str]) -> None:
    """Do what the first argument says."""
    what, *rest = arguments or ["speed"]
    if what == "draws":
        draws(rest[0], int(rest[1]) if len(rest) > 1 else 20)
    else:
        speed(float(rest[0]) if rest else 5.0)


if __name__ == "__main__":
    main(sys.argv[1:])
