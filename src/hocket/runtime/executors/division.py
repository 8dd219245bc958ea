"""A process per device of a division, trained by torch.distributed's pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hocket.base.errors import UsageError
from hocket.runtime.executors.executor import num_gpus, threads_each
from hocket.runtime.options import Backend, Onlookers, RunOptions

if TYPE_CHECKING:
    from hocket.hardware.cluster import Device
    from hocket.runtime.parallel.job import TrainingJob


@dataclass(frozen=True)
class DividedModel:
    """A model divided over the devices of a plan, those of a tensor-parallel group in a row."""

    job: TrainingJob
    device_names: Sequence[str]


@dataclass(frozen=True)
class DivisionExecutor:
    """A `PlanExecutor` for divisions."""

    backend: Backend
    processes_per_device = 1

    def suits(self, devices: Sequence[Device]) -> bool:
        """NCCL where there is a GPU for each rank; gloo goes everywhere."""
        return self.backend == "gloo" or len(devices) <= num_gpus()

    def places(self, devices: Sequence[Device]) -> list[str]:
        """The processor, or a GPU for each rank."""
        if self.backend == "gloo":
            return ["cpu"] * len(devices)
        gpus = num_gpus()
        if gpus < len(devices):
            raise UsageError(
                f"the plan takes {len(devices)} devices, this machine has {gpus} CUDA devices",
                hint="use --backend gloo for processes on the processor, or export the plan and "
                "start it with torchrun on several machines",
            )
        return [f"cuda:{rank}" for rank in range(len(devices))]

    def run(self, work: DividedModel, options: RunOptions, watch: Onlookers) -> None:
        """Carry out all steps."""
        from hocket.runtime.parallel.spawn import run_jobs

        run_jobs(
            [replace(work.job, steps=options.steps, seed=options.seed)],
            work.device_names,
            backend=self.backend,
            threads=threads_each(options, len(work.device_names)),
            silence_s=options.silence_s,
            on_start=watch.on_start,
            on_step=watch.on_step,
        )
