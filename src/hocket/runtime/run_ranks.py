"""A run in one process per device: start the ranks, watch over them, collect their steps."""

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
from hocket.processes.heartbeat import Position, how_far
from hocket.processes.worker import WorkerSpec
from hocket.processes.worker_group import Timeouts, WorkerGroup
from hocket.runtime.device_instructions import Transfer
from hocket.runtime.ranks import MeetingStore
from hocket.runtime.run_options import RunCallbacks, RunOptions
from hocket.runtime.step_record import StepParts, StepRecord
from hocket.runtime.synthetic_training import PER_STEP


@dataclass
class RanksReport:
    """Reports of ranks other than their steps."""

    transfers: tuple[Transfer, ...] | None = None
    """Of a placement."""
    state: dict[str, FloatArray] = field(default_factory=dict)
    """Parameters and buffers, flat, where they were asked for."""


def run_ranks(
    saved: SavedPlan,
    places: Mapping[str, str],
    given: Mapping[str, Any],
    options: RunOptions,
    backend: str,
    watch: RunCallbacks,
) -> RanksReport:
    """Train for all steps in one process per device; ``watch`` gets each step of all ranks.

    ``places`` are the real devices by device of the plan, in the order of ranks; ``given`` says
    what model they build.
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
    counts, report = [PER_STEP] * len(specs), RanksReport()

    def tell(positions: Sequence[Position]) -> None:
        watch.on_progress(how_far(positions, counts, options.steps))

    timeouts = Timeouts(silence_s=options.silence_s)
    plan = plan_to_data(saved.problem, saved.plan)
    with (
        closing(MeetingStore()) as store,
        WorkerGroup(specs, timeouts=timeouts, on_wait=tell) as group,
    ):
        watch.on_start(group.process_ids)
        for rank, (name, place) in enumerate(places.items()):
            group.send(rank, {
                **given, "rank": rank, "num_ranks": len(specs), "device": place,
                "backend": backend, "port": store.port, "threads": threads, "plan": plan,
                "steps": options.steps, "seed": options.seed,
                "slowdown": options.slowdown.get(name, 1.0), "import_paths": sys.path,
            })  # fmt: skip
        _collect(group, StepParts(len(specs)), report, watch)
    return report


def _collect(
    group: WorkerGroup, parts: StepParts, report: RanksReport, watch: RunCallbacks
) -> None:
    for _, header, buffers in group.messages():
        if header["what"] == "state":
            values = [np.frombuffer(data, dtype=np.float64) for data in buffers]
            report.state = dict(zip(header["names"], values, strict=True))
            continue
        if "transfers" in header:
            report.transfers = tuple(Transfer(*each) for each in header["transfers"])
        own = StepRecord.from_arrays(header["record"], buffers)
        record = parts.add(header["number"], own)
        if record is not None:
            watch.on_step(header["number"], record)


def _describe(position: Position) -> str:
    return f"in step {position.step}" if position.step else "building the model"
