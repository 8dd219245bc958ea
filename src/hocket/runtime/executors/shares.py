"""Plans that split a batch: all of it in this process, or a process per device."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hocket.base.errors import UsageError
from hocket.runtime.executors.executor import num_gpus, threads_each
from hocket.runtime.options import Onlookers, RunOptions

if TYPE_CHECKING:
    from hocket.hardware.cluster import Device
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem
    from hocket.processes.heartbeat import Position
    from hocket.runtime.rebuild import BuiltModel


@dataclass(frozen=True, eq=False)
class SplitModel:
    """A model whose batch is split over the devices of a plan."""

    problem: Problem
    plan: Plan
    model: BuiltModel
    device_names: Sequence[str]
    """In the order of the ranks."""
    places: Sequence[str]


@dataclass(frozen=True)
class OneProcessShares:
    """A `PlanExecutor` that takes one microbatch after the other, in this process."""

    processes_per_device = 0

    def suits(self, devices: Sequence[Device]) -> bool:
        """Where one device has all samples."""
        return len(devices) == 1

    def places(self, devices: Sequence[Device]) -> list[str]:
        """The first GPU, or the processor."""
        return ["cuda:0" if num_gpus() else "cpu"] * len(devices)

    def run(self, work: SplitModel, options: RunOptions, watch: Onlookers) -> None:
        """Train for all steps."""
        import torch

        from hocket.processes.heartbeat import Position, how_far
        from hocket.runtime.threads import torch_threads
        from hocket.runtime.train.synthetic import PER_STEP, SyntheticTraining

        def tell(number: int, done: int) -> None:
            watch.on_progress(how_far([Position(0.0, number, done)], [PER_STEP], options.steps))

        built = work.model
        with torch_threads(options.threads), torch.random.fork_rng():
            training = SyntheticTraining(
                work.problem, _on_one_device(work.plan), built.module, built.batch, built.loss,
                torch.device(work.places[0]), seed=options.seed,
            )  # fmt: skip
            for number in range(1, options.steps + 1):
                watch.on_step(number, training.step(number, tell))


@dataclass(frozen=True)
class RankedShares:
    """A `PlanExecutor` with one process per device, as `hocket launch` starts them."""

    backend: Literal["gloo", "nccl"]
    processes_per_device = 1

    def suits(self, devices: Sequence[Device]) -> bool:
        """NCCL where there is a GPU for each rank; gloo goes everywhere."""
        return self.backend == "gloo" or len(devices) <= num_gpus()

    def places(self, devices: Sequence[Device]) -> list[str]:
        """The processor, or a GPU for each rank."""
        if self.backend == "gloo":
            return ["cpu"] * len(devices)
        if num_gpus() < len(devices):
            raise UsageError(
                f"the plan uses {len(devices)} devices, this machine has {num_gpus()} CUDA devices",
                hint="use --backend gloo for processes on the processor",
            )
        return [f"cuda:{rank}" for rank in range(len(devices))]

    def run(self, work: SplitModel, options: RunOptions, watch: Onlookers) -> None:
        """Train for all steps; ``watch`` is told each one when all ranks have done it."""
        from hocket.plan.files import write_plan
        from hocket.runtime.connect import MeetingStore

        built = work.model
        if not built.name:
            raise UsageError(
                "a model that is only in this program cannot be built by other processes",
                hint="run it with backend='single', or name a function that builds it",
            )
        with tempfile.TemporaryDirectory() as folder, closing(MeetingStore()) as store:
            file = Path(folder) / "plan.json"
            write_plan(file, work.problem, work.plan)
            order: dict[str, Any] = {
                "num_ranks": len(work.places), "backend": self.backend, "port": store.port,
                "threads": threads_each(options, len(work.places)), "plan": str(file),
                "model": built.name, "options": dict(built.options), "steps": options.steps,
                "loss": built.loss if isinstance(built.loss, str) else None, "seed": options.seed,
            }  # fmt: skip
            self._train(work, order, options, watch)

    def _train(
        self, work: SplitModel, order: dict[str, Any], options: RunOptions, watch: Onlookers
    ) -> None:
        from hocket.processes.heartbeat import how_far
        from hocket.processes.worker import WorkerSpec
        from hocket.processes.worker_group import Timeouts, WorkerGroup
        from hocket.runtime.record import StepParts, StepRecord
        from hocket.runtime.train.synthetic import PER_STEP

        specs = [
            WorkerSpec(
                name=f"rank {rank} ({name})",
                module="hocket.runtime.synthetic_rank",
                describe=_describe,
                environment={"OMP_NUM_THREADS": str(order["threads"])},
            )
            for rank, name in enumerate(work.device_names)
        ]
        parts, counts = StepParts(len(specs)), [PER_STEP] * len(specs)

        def tell(positions: Sequence[Position]) -> None:
            watch.on_progress(how_far(positions, counts, options.steps))

        timeouts = Timeouts(silence_s=options.silence_s)
        with WorkerGroup(specs, timeouts=timeouts, on_wait=tell) as group:
            watch.on_start(group.process_ids)
            for rank, place in enumerate(work.places):
                group.send(rank, {**order, "rank": rank, "device": place})
            for _, header, buffers in group.messages():
                own = StepRecord.from_arrays(header["record"], buffers)
                record = parts.add(header["number"], own)
                if record is not None:
                    watch.on_step(header["number"], record)


def _describe(position: Position) -> str:
    return f"in step {position.step}" if position.step else "building the model"


def _on_one_device(plan: Plan) -> Plan:
    """The same microbatches, all on the first device."""
    from hocket.plan.sections import Parallel, Replica

    replicas = plan[Parallel].replicas
    sizes = tuple(size for replica in replicas for size in replica.microbatches)
    only = Replica(devices=replicas[0].devices[:1], microbatches=sizes)
    return plan.having(Parallel(replicas=(only,)))
