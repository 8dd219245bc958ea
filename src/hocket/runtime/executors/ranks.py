"""A process per device of a placement: on the processor over gloo, on GPUs over NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hocket.base.errors import UsageError
from hocket.runtime.executors.executor import PlacedProgram, num_gpus, threads_each
from hocket.runtime.options import Backend, Onlookers, RunOptions

if TYPE_CHECKING:
    from hocket.hardware.cluster import Device


@dataclass(frozen=True)
class RanksExecutor:
    """A `PlanExecutor` for placements."""

    backend: Backend
    processes_per_device = 1

    def suits(self, devices: Sequence[Device]) -> bool:
        """Gloo goes everywhere."""
        return self.backend == "gloo"

    def places(self, devices: Sequence[Device]) -> list[str]:
        """The processor, or a GPU for each rank."""
        if self.backend == "gloo":
            return ["cpu"] * len(devices)
        gpus, num_processors = num_gpus(), sum(device.kind.is_cpu for device in devices)
        if gpus < len(devices) or num_processors:
            raise UsageError(
                f"backend 'nccl' needs accelerators only and a CUDA device for each: the plan uses "
                f"{len(devices) - num_processors} accelerators and {num_processors} processors, "
                f"this machine has {gpus} CUDA devices",
                hint="use --backend gloo for processes on the processor, or single",
            )
        return [f"cuda:{rank}" for rank in range(len(devices))]

    def run(self, work: PlacedProgram, options: RunOptions, watch: Onlookers) -> None:
        """Carry out all steps."""
        from hocket.runtime.spawn import RankOptions, run_ranks

        names = work.device_names
        run_ranks(
            work.setup,
            work.values,
            names,
            RankOptions(
                backend=self.backend,
                steps=options.steps,
                seed=options.seed,
                threads=threads_each(options, len(work.setup.split.used_devices)),
                slowdown={names.index(name): by for name, by in options.slowdown.items()},
                silence_s=options.silence_s,
            ),
            on_start=watch.on_start,
            on_step=watch.on_step,
            on_progress=watch.on_progress,
        )
