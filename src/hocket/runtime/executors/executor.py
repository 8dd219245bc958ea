"""What a session asks of a way to carry out a plan, and what it must be able to rely on.

* ``places`` and ``suits`` look at the machine and start nothing; what cannot be done here is
  refused by ``places``, with what to do instead.
* ``run`` carries out step 1, 2, … as often as it is told, calls ``watch.on_step`` once for each, in
  order, and returns after the last.
* The same work with the same seed gives the same losses, whichever executor carries it out, but
  for what the arithmetic of other devices rounds.
* A process that dies, stops or fails is named in a `RunError` with what it was doing.
* However ``run`` ends, no process, file or port that it made is left.

What is imported here is light: the command line asks for the names of executors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from hocket.runtime.options import Onlookers, RunOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from hocket.hardware.cluster import Device
    from hocket.runtime.setup import Setup

Work = TypeVar("Work", contravariant=True)


@dataclass(frozen=True, eq=False)
class PlacedProgram:
    """A captured program split over the devices of a plan, with the values that it starts from."""

    setup: Setup
    values: Mapping[str, torch.Tensor]
    """By name of a parameter, a buffer or an input."""
    device_names: Sequence[str]
    places: Mapping[int, str]
    """By used device of the plan: what it is carried out on."""


class PlanExecutor(Protocol[Work]):
    """A way to carry out one kind of work."""

    @property
    def processes_per_device(self) -> int:
        """Processes that it starts for each device of the plan."""

    def suits(self, devices: Sequence[Device]) -> bool:
        """Whether it is the natural choice for a plan that uses these devices, on this machine."""

    def places(self, devices: Sequence[Device]) -> list[str]:
        """What each of these devices would be carried out on here: ``cpu``, ``cuda:0``.

        Raises `UsageError` where this machine cannot.
        """

    def run(self, work: Work, options: RunOptions, watch: Onlookers) -> None:
        """Carry out all steps."""


def num_gpus() -> int:
    """CUDA devices of this machine."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def threads_each(options: RunOptions, num_processes: int) -> int:
    """Threads of each process: those that were asked for, else its share of the cores."""
    return options.threads or max(1, (os.cpu_count() or 1) // num_processes)
