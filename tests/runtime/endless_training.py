"""A script for `hocket launch` that trains by the strategy of its argument until it is killed."""

import os
import sys

import torch
from runtime.divided_models import words

import hocket
from hocket.transformer import ParallelConfig

CONFIGS = {
    "ddp": ParallelConfig(data=2, global_batch=8),
    "unequal": ParallelConfig(data=2, global_batch=8, shares=(6, 2)),
    "zero": ParallelConfig(data=2, global_batch=8, zero=2),
    "fsdp": ParallelConfig(data=2, global_batch=8, zero=3),
    "pipeline": ParallelConfig(pipeline=2, global_batch=8, microbatch=2),
    "tensor": ParallelConfig(tensor=2, global_batch=8),
    "budget": ParallelConfig(data=2, global_batch=8),
}

if __name__ == "__main__":
    name = sys.argv[1]
    torch.manual_seed(0)
    model, batches, forward = words()
    train = hocket.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), batches[0], plan=CONFIGS[name],
        forward=forward, memory="130KiB" if name == "budget" else None,
    )  # fmt: skip
    for number in range(10**9):
        train.step(batches[number % 3])
        if number == 2:
            sys.stdout.write(f"pid {os.getpid()}\n")
