"""Training started by ``torchrun``, without a supervisor: the main part of exported scripts."""

from __future__ import annotations

import argparse
import csv
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from hocket.runtime.parallel.job import Actions, TrainingJob
from hocket.runtime.parallel.pipeline import require_pipelining
from hocket.runtime.parallel.trainer import Trainer


def train(job: TrainingJob) -> None:
    """Train with made-up text and write the loss of every step."""
    given = _arguments()
    require_pipelining(job.device_of_stage)
    device = _join()
    usual = job.dtype if device.type == "cuda" else "float32"
    job = replace(job, steps=given.steps, seed=given.seed, dtype=given.dtype or usual)
    trainer = Trainer(job, device, lambda step, action: None)
    for number in range(1, job.steps + 1):
        step = trainer.step(number)
        if step.loss is not None and not trainer.data_rank and not trainer.tensor_rank:
            took_s = step.end_s - step.start_s
            sys.stdout.write(f"step {number} loss {step.loss:.9g} {took_s:.3f} s\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def read_actions(path: Path) -> Actions:
    """Stage, letter and microbatch of each action of each pipeline rank, from a CSV file."""
    with path.open(newline="") as file:
        return tuple(tuple(_action(cell) for cell in row) for row in csv.reader(file))


def _action(cell: str) -> tuple[int, str, int]:
    stage, letter, microbatch = re.split("([FBIW])", cell)
    return int(stage), letter, int(microbatch)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", help="float32, bfloat16 …; as planned on GPUs where not given")
    return parser.parse_args()


def _join() -> torch.device:
    """Join the other processes of torchrun; this one's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device
