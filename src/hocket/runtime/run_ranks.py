"""``hocket run`` in one process per device: start ranks, supervise them, and join their records."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.plan.files import SavedPlan, plan_to_data
from hocket.processes.heartbeat import Position
from hocket.processes.worker import WorkerSpec
from hocket.processes.worker_group import Timeouts, WorkerGroup
from hocket.runtime.device_instructions import Transfer
from hocket.runtime.ranks import MeetingStore
from hocket.runtime.run_options import RunCallbacks, RunOptions
from hocket.runtime.step_record import StepRecord, joined


@dataclass
class RanksReport:
    """Reports of ranks other than their steps."""

    transfers: tuple[Transfer, ...] | None = None
    """Transfers between the devices of a placement."""
    state: dict[str, FloatArray] = field(default_factory=dict)
    """Flat parameters and buffers, if they were requested."""


def run_ranks(
    saved: SavedPlan,
    places: Mapping[str, str],
    given: Mapping[str, Any],
    options: RunOptions,
    backend: str,
    watch: RunCallbacks,
) -> RanksReport:
    """Train all steps in one process per device; ``watch`` gets the joined record of each step.

    ``places`` maps the devices of the plan, in the order of ranks, to real devices; ``given``
    describes the model that the ranks build.
    """
    threads = options.threads or max(1, (os.cpu_count() or 1) // len(places))
    specs = [
        WorkerSpec(
            name=f"rank {rank} ({name})",
            module="hocket.runtime.run_rank",
            describe=_describe,
            environment={"OMP_NUM_THREADS": str(threads)},
        )
        for rank, name in enumerate(places)
    ]

    def show(positions: Sequence[Position]) -> None:
        step = min(position.step for position in positions)
        watch.on_progress(f"step {step} of {options.steps}" if step else "starting the processes")

    with (
        closing(MeetingStore()) as store,
        WorkerGroup(specs, timeouts=Timeouts(silence_s=options.silence_s), on_wait=show) as group,
    ):
        watch.on_start(group.process_ids)
        header = {
            **given, "num_ranks": len(specs), "backend": backend, "port": store.port,
            "threads": threads, "plan": plan_to_data(saved.problem, saved.plan),
            "steps": options.steps, "seed": options.seed, "import_paths": sys.path,
        }  # fmt: skip
        for rank, place in enumerate(places.values()):
            group.send(rank, {**header, "rank": rank, "device": place})
        return _collect(group, len(specs), watch)


def _collect(group: WorkerGroup, num_ranks: int, watch: RunCallbacks) -> RanksReport:
    """Call ``watch.on_step`` once all ranks have reported a step; return the other reports."""
    report, steps = RanksReport(), dict[int, list[StepRecord]]()
    for _, header, buffers in group.messages():
        if header["what"] == "state":
            values = [np.frombuffer(data, dtype=np.float64) for data in buffers]
            report.state = dict(zip(header["names"], values, strict=True))
            continue
        if "transfers" in header:
            report.transfers = tuple(Transfer(*each) for each in header["transfers"])
        number = header["number"]
        records = steps.setdefault(number, [])
        records.append(StepRecord.from_data(header["record"]))
        if len(records) == num_ranks:
            watch.on_step(number, joined(steps.pop(number)))
    return report


def _describe(position: Position) -> str:
    return f"in step {position.step}" if position.step else "building the model"
