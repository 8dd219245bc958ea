"""Carry out parallel jobs with one process per rank, under the supervisor of all runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hocket.runtime.connect import Store
from hocket.runtime.executors.division import Backend
from hocket.runtime.options import SILENCE_S, OnStart, OnStep
from hocket.runtime.parallel.job import Job
from hocket.runtime.parallel.pipeline import require_pipelining
from hocket.runtime.progress import Position
from hocket.runtime.record import StepRecord, joined
from hocket.runtime.supervise import RankSpec, Supervisor
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
    jobs: Sequence[Job],
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
    parts: dict[tuple[int, int], list[StepRecord]] = {}
    store = Store()
    try:
        specs = [
            _rank_spec(jobs, rank, device_names, backend, threads, store.port)
            for rank in range(len(device_names))
        ]
        with Supervisor(specs, silence_s=silence_s) as supervisor:
            on_start(supervisor.process_ids)
            for rank, header, buffers in supervisor.messages():
                result, job = results[header["job"]], jobs[header["job"]]
                if header["what"] == "gradients":
                    result.gradients[rank] = _tensors(job, header["names"], buffers)
                    continue
                key = header["job"], header["number"]
                parts.setdefault(key, []).append(StepRecord.from_arrays(header["record"], buffers))
                if len(parts[key]) == len(specs):
                    record = joined(parts.pop(key))
                    result.records.append(record)
                    on_step(header["number"], record)
    finally:
        store.close()
    return results


def _rank_spec(
    jobs: Sequence[Job],
    rank: int,
    device_names: Sequence[str],
    backend: Backend,
    threads: int,
    port: int,
) -> RankSpec:
    header = {
        "rank": rank,
        "num_ranks": len(device_names),
        "backend": backend,
        "port": port,
        "device": f"cuda:{rank}" if backend == "nccl" else "cpu",
        "threads": threads,
        "jobs": [job.as_dict() for job in jobs],
    }
    division = jobs[0].division
    return RankSpec(
        device_name=device_names[rank],
        header=header,
        buffers=(),
        describe=_describer(jobs[0], rank // (division.data * division.tensor)),
        environment={"OMP_NUM_THREADS": str(threads)},
        program="hocket.runtime.parallel.rank",
    )


def _describer(job: Job, pipeline_rank: int) -> Callable[[Position], str]:
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
    job: Job, names: Sequence[str], buffers: Sequence[bytearray]
) -> dict[str, torch.Tensor]:
    dtype = getattr(torch, job.dtype)
    flat = [from_raw(data).view(dtype) for data in buffers]
    return dict(zip(names, flat, strict=True))
