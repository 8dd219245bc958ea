"""Carry out parallel jobs with one process per rank, one group for all jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch

from hocket.processes.heartbeat import Position
from hocket.processes.worker import WorkerSpec
from hocket.processes.worker_group import Timeouts, WorkerGroup
from hocket.runtime.connect import MeetingStore
from hocket.runtime.options import SILENCE_S, Backend, OnStart, OnStep
from hocket.runtime.parallel.job import TrainingJob
from hocket.runtime.parallel.pipeline import require_pipelining
from hocket.runtime.record import StepParts, StepRecord
from hocket.runtime.wire import from_raw

_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "the gradient of the input",
    "W": "the gradient of the weights",
}


@dataclass(frozen=True)
class JobResult:
    """What the ranks of one job reported."""

    records: list[StepRecord] = field(default_factory=list)
    """Of each step, from all ranks together."""
    gradients: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """By rank and parameter, where the job wants them."""

    @property
    def losses(self) -> tuple[float, ...]:
        """Of each step."""
        return losses_of(self.records)


def losses_of(records: Sequence[StepRecord]) -> tuple[float, ...]:
    """Of each step."""
    return tuple(math.nan if record.loss is None else record.loss for record in records)


def run_jobs(
    jobs: Sequence[TrainingJob],
    device_names: Sequence[str],
    *,
    backend: Backend = "gloo",
    threads: int = 1,
    silence_s: float = SILENCE_S,
    on_start: OnStart = lambda process_ids: None,
    on_step: OnStep = lambda number, record: None,
) -> list[JobResult]:
    """Run jobs one after another in one set of processes; all take the same number of ranks.

    ``device_names`` are those of the ranks, tensor parallel fastest.
    """
    for job in jobs:
        require_pipelining(job.device_of_stage)
    results = [JobResult() for _ in jobs]
    with closing(MeetingStore()) as store:
        specs = [
            _rank_spec(jobs[0], rank, device_name, threads)
            for rank, device_name in enumerate(device_names)
        ]
        parts = StepParts(len(specs))
        with WorkerGroup(specs, timeouts=Timeouts(silence_s=silence_s)) as group:
            on_start(group.process_ids)
            for rank in range(len(specs)):
                group.send(rank, _order(jobs, rank, len(specs), backend, threads, store.port))
            for rank, header, buffers in group.messages():
                result, job = results[header["job"]], jobs[header["job"]]
                if header["what"] == "gradients":
                    result.gradients[rank] = _tensors(job, header["names"], buffers)
                    continue
                own = StepRecord.from_arrays(header["record"], buffers)
                record = parts.add((header["job"], header["number"]), own)
                if record is not None:
                    result.records.append(record)
                    on_step(header["number"], record)
    return results


def _rank_spec(job: TrainingJob, rank: int, device_name: str, threads: int) -> WorkerSpec:
    return WorkerSpec(
        name=f"rank {rank} ({device_name})",
        module="hocket.runtime.parallel.rank",
        describe=_describer(job, rank // (job.division.data * job.division.tensor)),
        environment={"OMP_NUM_THREADS": str(threads)},
    )


def _order(
    jobs: Sequence[TrainingJob],
    rank: int,
    num_ranks: int,
    backend: Backend,
    threads: int,
    port: int,
) -> dict[str, Any]:
    """What a rank is told at first."""
    return {
        "rank": rank,
        "num_ranks": num_ranks,
        "backend": backend,
        "port": port,
        "device": f"cuda:{rank}" if backend == "nccl" else "cpu",
        "threads": threads,
        "jobs": [job.as_dict() for job in jobs],
    }


def _describer(job: TrainingJob, pipeline_rank: int) -> Callable[[Position], str]:
    """What a rank does at a position, for people."""
    actions = job.actions[pipeline_rank]

    def describe(position: Position) -> str:
        if not position.step or position.instruction >= len(actions):
            return "starting"
        stage, letter, microbatch = actions[position.instruction]
        return (
            f"at {_WORDS[letter]} of microbatch {microbatch} on stage {stage} "
            f"in step {position.step}"
        )

    return describe


def _tensors(
    job: TrainingJob, names: Sequence[str], buffers: Sequence[bytearray]
) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, job.dtype)
    flat = [from_raw(data).view(dtype) for data in buffers]
    return dict(zip(names, flat, strict=True))
