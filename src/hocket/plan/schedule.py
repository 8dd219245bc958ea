"""A pipeline schedule as data: what each device does with which stage and microbatch, in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from hocket.base.arrays import IntArray


class Work(IntEnum):
    """What is done with one microbatch on one virtual stage."""

    FORWARD = 0
    BACKWARD = 1
    """Gradients of inputs and weights together."""
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule:
    """What every device of a pipeline does, in order.

    Actions of device ``i`` are those from ``start[i]`` to ``start[i + 1]``. Each virtual stage does
    each microbatch forward once, and backward either as one action or as two. Transfers between
    stages are not listed: they follow from the actions.
    """

    name: str
    num_microbatches: int
    device_of_stage: IntArray
    """The device of each virtual stage, in order of the model."""
    start: IntArray
    """Where each device's actions begin, and their number at the end."""
    work: IntArray
    """`Work` of each action."""
    stage: IntArray
    """Virtual stage of each action."""
    microbatch: IntArray

    @property
    def num_stages(self) -> int:
        """Virtual stages."""
        return len(self.device_of_stage)

    @property
    def num_devices(self) -> int:
        """Devices of one pipeline."""
        return len(self.start) - 1

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are separate actions anywhere."""
        return bool(np.any(self.work >= Work.INPUT_GRADIENT))
