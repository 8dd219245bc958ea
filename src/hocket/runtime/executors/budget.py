"""Training in this process that counts what it holds: memory plans, and waves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hocket.runtime.executors.executor import num_gpus
from hocket.runtime.options import Onlookers, RunOptions

if TYPE_CHECKING:
    import torch

    from hocket.hardware.cluster import Device
    from hocket.runtime.memory.ledger import Ledger
    from hocket.runtime.record import StepRecord
    from hocket.runtime.training import TrainingLoop

_NUM_COUNTED = 3
"""Steps on a processor whose bytes are counted storage by storage, which takes time. State that
visits the device has its room there from the backward pass of the second step on."""


@dataclass(frozen=True, eq=False)
class LoopedModel:
    """A model under a plan, ready to train."""

    train: TrainingLoop
    lasting: Callable[[], Iterable[torch.Tensor]]
    """What is on the device before a step and stays; the batch, where it is there as a whole."""
    batch: Any
    place: str


@dataclass(frozen=True)
class OneProcessLoop:
    """A `PlanExecutor` for memory plans and waves."""

    processes_per_device = 0

    def suits(self, devices: Sequence[Device]) -> bool:
        """Always: such a plan has one device."""
        return True

    def places(self, devices: Sequence[Device]) -> list[str]:
        """The first GPU, or the processor."""
        return ["cuda:0" if num_gpus() else "cpu"] * len(devices)

    def run(self, work: LoopedModel, options: RunOptions, watch: Onlookers) -> None:
        """Carry out all steps."""
        import torch

        from hocket.runtime.threads import torch_threads

        with torch_threads(options.threads), torch.random.fork_rng(), ExitStack() as counting:
            ledger = counting.enter_context(_counting(work)) if work.place == "cpu" else None
            for number in range(1, options.steps + 1):
                if number > _NUM_COUNTED:
                    counting.close()
                watch.on_progress(f"step {number} of {options.steps}")
                record = _step(work, number, options.seed)
                if ledger is None:
                    record.peak_bytes[0] = int(torch.cuda.max_memory_allocated())
                elif number <= _NUM_COUNTED:
                    record.peak_bytes[0] = ledger.peak_bytes
                watch.on_step(number, record)


def _step(work: LoopedModel, number: int, seed: int) -> StepRecord:
    import torch

    from hocket.capture.perform import draw_seed
    from hocket.runtime.record import StepRecord

    torch.manual_seed(draw_seed(seed, number, 0))
    record = StepRecord(start_s=time.perf_counter())
    record.loss = work.train.step(work.batch).item()
    record.end_s = time.perf_counter()
    return record


@contextmanager
def _counting(work: LoopedModel) -> Iterator[Ledger]:
    """Counts what is there before the first step and what steps make."""
    from hocket.runtime.memory.ledger import Ledger

    ledger = Ledger()
    with ledger:
        ledger.hold(work.lasting())
        yield ledger
