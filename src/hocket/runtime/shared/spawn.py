"""Carry out shares with one process per replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from hocket.processes.crew import Crew
from hocket.processes.member import ProcessSpec
from hocket.processes.patience import Patience
from hocket.processes.progress import Position, how_far
from hocket.runtime.connect import MeetingStore
from hocket.runtime.options import Onlookers
from hocket.runtime.record import StepParts, StepRecord
from hocket.runtime.shared.job import PER_MICROBATCH, ShareJob


def run_replicas(
    job: ShareJob,
    device_names: Sequence[str],
    places: Sequence[str],
    *,
    backend: str,
    threads: int,
    silence_s: float,
    watch: Onlookers,
) -> None:
    """Train; ``watch`` is told each step when all replicas have done it."""
    with closing(MeetingStore()) as store:
        specs = [
            ProcessSpec(
                name=f"replica {rank} ({name})",
                module="hocket.runtime.shared.rank",
                describe=_describe,
                environment={"OMP_NUM_THREADS": str(threads)},
            )
            for rank, name in enumerate(device_names)
        ]
        parts = StepParts(len(specs))
        counts = [len(rows) * PER_MICROBATCH for rows in job.rows]

        def tell(positions: Sequence[Position]) -> None:
            watch.on_progress(how_far(positions, counts, job.steps))

        with Crew(specs, patience=Patience(silence_s=silence_s), on_wait=tell) as crew:
            watch.on_start(crew.process_ids)
            for rank, place in enumerate(places):
                order: dict[str, Any] = {
                    "rank": rank, "num_ranks": len(specs), "backend": backend, "port": store.port,
                    "device": place, "threads": threads, "job": job.as_dict(),
                }  # fmt: skip
                crew.tell(rank, order)
            for _, header, buffers in crew.messages():
                own = StepRecord.from_arrays(header["record"], buffers)
                record = parts.add(header["number"], own)
                if record is not None:
                    watch.on_step(header["number"], record)


def _describe(position: Position) -> str:
    if not position.step:
        return "building the model"
    return f"at microbatch {position.instruction // PER_MICROBATCH} in step {position.step}"
