"""All devices of a placement in this process: on GPUs where there are any, else on processors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from hocket.runtime.executors.executor import PlacedProgram, num_gpus
from hocket.runtime.options import Onlookers, RunOptions

if TYPE_CHECKING:
    from hocket.hardware.cluster import Device


class SingleExecutor:
    """A `PlanExecutor` for placements."""

    processes_per_device = 0

    def suits(self, devices: Sequence[Device]) -> bool:
        """Where one device is used, or each accelerator can be a GPU of its own."""
        num_accelerators = sum(not device.kind.is_cpu for device in devices)
        return len(devices) == 1 or 0 < num_accelerators <= num_gpus()

    def places(self, devices: Sequence[Device]) -> list[str]:
        """Accelerators on the GPUs in turn; everything else on the processor."""
        gpus, turn = num_gpus(), count()
        return [
            "cpu" if device.kind.is_cpu or not gpus else f"cuda:{next(turn) % gpus}"
            for device in devices
        ]

    def run(self, work: PlacedProgram, options: RunOptions, watch: Onlookers) -> None:
        """Carry out all steps."""
        import torch

        from hocket.runtime.single import SingleProcess
        from hocket.runtime.threads import torch_threads

        num_devices = work.setup.split.num_devices
        devices = [torch.device(work.places.get(d, "cpu")) for d in range(num_devices)]
        with torch_threads(options.threads):
            process = SingleProcess(work.setup, work.values, devices, seed=options.seed)
            for number in range(1, options.steps + 1):
                watch.on_progress(f"step {number} of {options.steps}")
                watch.on_step(number, process.step(number))
