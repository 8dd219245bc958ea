"""Parallel plans of one rank on one GPU: the predicted step against the measured one.

    PYTHONPATH=src python benchmarks/parallelism/gpu.py [--steps 8]

Each plan is carried out as `hocket run` does, by a process with NCCL, in bfloat16; the prediction
is that of `hocket parallel` for the software ``torch`` with nothing measured. It shows how far the
model of a single device (matrix products, attention, launches, optimizer) is from this machine;
traffic between devices is not exercised. The runtime keeps no 32-bit copy of the weights, which the
prediction's optimizer counts.
"""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import replace

import torch

from hocket.cost.parallel.softwares import find_software
from hocket.cost.parallel.step import predict
from hocket.hardware.shorthand import cluster_from_text
from hocket.plan.plan import Plan
from hocket.plan.problem import Problem
from hocket.plan.sections import Parallel
from hocket.plan.training import TransformerTraining
from hocket.plan.transformer_plan import TransformerPlan
from hocket.planners.parallel.schedules import make_schedule
from hocket.runtime.run import run_plan
from hocket.runtime.run_options import RunOptions
from hocket.transformer import ParallelConfig, ParallelConfigs, Transformer

WIDE = Transformer(
    name="wide", hidden=4096, layers=4, heads=32, kv_heads=8, head_width=128, mlp_width=14336,
    mlp="swiglu", vocabulary=32000, sequence=4096, tied_embeddings=False, learned_positions=False,
    biases=False, dropout=False,
)  # fmt: skip
SHAPES = (
    replace(
        WIDE, name="gpt 1024x24", hidden=1024, layers=24, heads=16, kv_heads=16, head_width=64,
        mlp_width=4096, mlp="gelu", vocabulary=50304, sequence=1024, tied_embeddings=True,
        learned_positions=True, biases=True,
    ),
    replace(
        WIDE, name="gpt 2304x24", hidden=2304, layers=24, heads=24, kv_heads=24, head_width=96,
        mlp_width=9216, mlp="gelu", vocabulary=51200, sequence=2048, tied_embeddings=True,
        learned_positions=True, biases=True,
    ),
    replace(
        WIDE, name="llama 2048x16", hidden=2048, layers=16, heads=32, kv_heads=8, head_width=64,
        mlp_width=8192, sequence=2048,
    ),
    WIDE,
)  # fmt: skip
CASES = (
    ("none", 4, 1), ("none", 4, 4), ("full", 4, 4), ("none", 1, 8),
)  # fmt: skip
"""Recomputation, microbatch, number of microbatches."""


def plan_of(model: Transformer, config: ParallelConfig) -> TransformerPlan:
    cluster = cluster_from_text("1xh200")
    software = find_software("torch")
    step_s = predict(model, ParallelConfigs.of([config]), cluster, software).step_s
    devices = ((cluster.device_names[0],),)
    parallel = Parallel.of_config(config, model, devices)
    plan = Plan(sections=(parallel, make_schedule("1f1b", 1, config.num_microbatches)))
    work = TransformerTraining(model=model, global_batch=config.global_batch, software=software)
    problem = Problem(work=work, cluster=cluster)
    return TransformerPlan(problem, plan.claiming(step_s=float(step_s[0])))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    steps = parser.parse_args().steps
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, Python {platform.python_version()}, {steps} steps")
    print("\n| model | recompute | microbatch x count | predicted, ms | measured, ms | error |")
    print("|---|---|---|---|---|---|")
    errors = []
    for model in SHAPES:
        for recompute, microbatch, count in CASES:
            config = ParallelConfig(
                microbatch=microbatch, global_batch=microbatch * count, recompute=recompute
            )
            plan = plan_of(model, config)
            options = RunOptions(steps=steps, backend="nccl", checks=False)
            try:
                measured_s = run_plan(plan.problem, plan.plan, options).median_step_s
            except Exception as error:
                print(f"{model.name}, {config}: {error}", file=sys.stderr)
                continue
            errors.append(plan.step_s / measured_s - 1)
            print(
                f"| {model.name} | {recompute} | {microbatch} x {count} | {1e3 * plan.step_s:.1f} "
                f"| {1e3 * measured_s:.1f} | {errors[-1]:+.1%} |",
                flush=True,
            )
    mean = sum(map(abs, errors)) / max(len(errors), 1)
    print(f"\nmean error {mean:.1%}, bias {sum(errors) / max(len(errors), 1):+.1%}")


if __name__ == "__main__":
    main()
