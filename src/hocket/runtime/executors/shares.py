"""Shares of a batch: all replicas in this process, or a process for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from hocket.base.errors import UsageError
from hocket.runtime.executors.executor import num_gpus, threads_each
from hocket.runtime.options import Onlookers, RunOptions

if TYPE_CHECKING:
    from torch import nn

    from hocket.capture.loss import Loss
    from hocket.hardware.cluster import Device
    from hocket.runtime.shared.job import ShareJob


@dataclass(frozen=True, eq=False)
class SharedModel:
    """A model whose batch is shared out, with the first device of each replica."""

    job: ShareJob
    model: nn.Module
    batch: Any
    loss: Loss | str | None
    device_names: Sequence[str]
    places: Sequence[str]


@dataclass(frozen=True)
class OneProcessShares:
    """A `PlanExecutor` for shares: one microbatch after the other, in this process."""

    processes_per_device = 0

    def suits(self, devices: Sequence[Device]) -> bool:
        """Where one device has all samples."""
        return len(devices) == 1

    def places(self, devices: Sequence[Device]) -> list[str]:
        """The first GPU, or the processor."""
        return ["cuda:0" if num_gpus() else "cpu"] * len(devices)

    def run(self, work: SharedModel, options: RunOptions, watch: Onlookers) -> None:
        """Carry out all steps."""
        import torch

        from hocket.processes.progress import Position, how_far
        from hocket.runtime.shared.job import PER_MICROBATCH
        from hocket.runtime.shared.trainer import ReplicaTrainer
        from hocket.runtime.threads import torch_threads

        job = work.job
        with torch_threads(options.threads), torch.random.fork_rng():
            microbatches = [rows for own in job.rows for rows in own]
            trainer = ReplicaTrainer(
                work.model, work.batch, work.loss, job.update, microbatches,
                num_samples=job.num_samples, seed=options.seed,
                device=torch.device(work.places[0]),
            )  # fmt: skip

            def tell(number: int, done: int) -> None:
                at, count = Position(0.0, number, done), len(microbatches) * PER_MICROBATCH
                watch.on_progress(how_far([at], [count], options.steps))

            for number in range(1, options.steps + 1):
                watch.on_step(number, trainer.step(number, tell))


@dataclass(frozen=True)
class RankedShares:
    """A `PlanExecutor` for shares: one process per replica, gradients summed between them."""

    backend: Literal["gloo", "nccl"]
    processes_per_device = 1

    def suits(self, devices: Sequence[Device]) -> bool:
        """NCCL where there is a GPU for each replica; gloo goes everywhere."""
        return self.backend == "gloo" or len(devices) <= num_gpus()

    def places(self, devices: Sequence[Device]) -> list[str]:
        """The processor, or a GPU for each replica."""
        if self.backend == "gloo":
            return ["cpu"] * len(devices)
        if num_gpus() < len(devices):
            raise UsageError(
                f"the plan has {len(devices)} replicas, this machine has {num_gpus()} CUDA devices",
                hint="use --backend gloo for processes on the processor",
            )
        return [f"cuda:{rank}" for rank in range(len(devices))]

    def run(self, work: SharedModel, options: RunOptions, watch: Onlookers) -> None:
        """Carry out all steps."""
        from hocket.runtime.shared.spawn import run_replicas

        if not work.job.model:
            raise UsageError(
                "a model that is only in this program cannot be built by other processes",
                hint="run it with backend='single', or name a function that builds it",
            )
        run_replicas(
            replace(work.job, steps=options.steps, seed=options.seed),
            work.device_names,
            work.places,
            backend=self.backend,
            threads=threads_each(options, len(work.device_names)),
            silence_s=options.silence_s,
            watch=watch,
        )
