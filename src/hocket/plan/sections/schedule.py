"""The schedule section: the order of the passes that each pipeline rank runs.

A pass is one stage with one microbatch. Files write it as a word: ``F0.3`` is the forward pass of
stage 0 with microbatch 3, ``B`` its backward pass, ``I`` and ``W`` the two halves of a split
backward pass, for the gradients of inputs and of weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from hocket.base import fields
from hocket.base.arrays import IntArray, LongArray
from hocket.base.errors import InputFileError
from hocket.plan.sections.parallel import Parallel
from hocket.plan.sections.section import Section
from hocket.plan.violation import Violation

if TYPE_CHECKING:
    from hocket.plan.plan import Plan
    from hocket.plan.problem import Problem

MAX_COUNT = 2**31 - 1


class StageWork(IntEnum):
    """Type of pass of one microbatch through one virtual stage."""

    FORWARD = 0
    BACKWARD = 1
    """Backward pass that is not split: gradients of inputs and weights."""
    INPUT_GRADIENT = 2
    WEIGHT_GRADIENT = 3


LETTERS = "FBIW"
"""Letter of each `StageWork`."""
_ACTION = re.compile(r"([FBIW])([0-9]{1,9})\.([0-9]{1,9})")


@dataclass(frozen=True, eq=False, kw_only=True)
class Schedule(Section):
    """Passes of every device of a pipeline, in order.

    The actions of device ``i`` are ``start[i]`` up to ``start[i + 1]``. Each virtual stage runs the
    forward pass of each microbatch once, and the backward pass as one action or as two. Transfers
    between stages are not listed, since they follow from the actions.
    """

    name: str
    num_microbatches: int
    device_of_stage: IntArray
    """Device of each virtual stage, in the order of the model."""
    start: IntArray
    """Position of each device's first action, and the number of actions as the last entry."""
    work: IntArray
    """`StageWork` of each action."""
    stage: IntArray
    """Virtual stage of each action."""
    microbatch: IntArray

    @property
    def num_stages(self) -> int:
        """Number of virtual stages."""
        return len(self.device_of_stage)

    @property
    def num_devices(self) -> int:
        """Number of devices of one pipeline."""
        return len(self.start) - 1

    @property
    def splits_backward(self) -> bool:
        """True if any backward pass is split into gradients of inputs and of weights."""
        return bool(np.any(self.work >= StageWork.INPUT_GRADIENT))

    def to_data(self) -> dict[str, Any]:
        """The section as plain data."""
        return {
            "name": self.name,
            "num_microbatches": self.num_microbatches,
            "device_of_stage": self.device_of_stage.tolist(),
            "actions": [" ".join(words) for words in schedule_words(self)],
        }

    @classmethod
    def from_data(cls, data: object, problem: Problem) -> Schedule:
        """Read the section from plain data; raises `InputFileError`."""
        keys = ("name", "num_microbatches", "device_of_stage", "actions")
        entry = fields.record(data, "schedule", required=keys)
        starts, rows = [0], [np.zeros((0, 3), dtype=np.int32)]
        for rank, line in enumerate(fields.text_column(entry["actions"], "schedule.actions")):
            rows.append(_actions(line, f"schedule.actions[{rank}]"))
            starts.append(starts[-1] + len(rows[-1]))
        work, stage, microbatch = np.ascontiguousarray(np.concatenate(rows).T)
        count = fields.integer(entry["num_microbatches"], "schedule.num_microbatches", 1, MAX_COUNT)
        devices = fields.int_column(
            entry["device_of_stage"], "schedule.device_of_stage", 0, MAX_COUNT
        )
        return cls(
            name=fields.text(entry["name"], "schedule.name"),
            num_microbatches=count,
            device_of_stage=devices.astype(np.int32),
            start=np.array(starts, dtype=np.int32),
            work=work,
            stage=stage,
            microbatch=microbatch,
        )

    def verify(self, problem: Problem, plan: Plan) -> Iterator[Violation]:
        """Check that stages run each microbatch forward and backward once. O(actions)."""
        placed = plan.get(Parallel)
        if placed is None:
            yield Violation("schedule", "the plan has a schedule and no parallel section")
            return
        if placed.layers is None:
            yield Violation("schedule", "the schedule is for stages of layers, not for ops")
            return
        config = placed.config
        if self.num_microbatches != config.num_microbatches:
            yield Violation(
                "schedule",
                f"the schedule is for {self.num_microbatches} microbatches, "
                f"the config makes {config.num_microbatches}",
            )
        elif self.num_stages != config.num_stages or self.num_devices != config.pipeline:
            yield Violation(
                "schedule",
                f"the schedule has {self.num_stages} stages on {self.num_devices} ranks, "
                f"the config {config.num_stages} on {config.pipeline}",
            )
        elif np.any(self.device_of_stage >= config.pipeline):
            yield Violation("schedule", "a stage is on a rank that does not exist")
        else:
            yield from wrong_actions(self)


def round_order(count: int, warm_up: LongArray, weight_lag: LongArray | None = None) -> LongArray:
    """Return [device, position]: the order of ``count`` forward passes and as many backward passes.

    Each device runs ``warm_up`` forward passes, then a backward and a forward pass in turn. Entries
    below ``count`` are forward passes, the next ``count`` are backward passes. With ``weight_lag``
    the last ``count`` are weight gradients, which come that many rounds after their pass.
    """
    number = np.arange(count)
    # Three slots per round: the forward pass, the backward pass and the weight gradient.
    keys = [3 * (number - warm_up[:, None]), np.tile(3 * number + 1, (len(warm_up), 1))]
    if weight_lag is not None:
        keys.append(3 * (number + weight_lag[:, None]) + 2)
    return np.concatenate(keys, axis=1).argsort(axis=1, kind="stable")


def schedule_words(schedule: Schedule) -> Iterator[list[str]]:
    """Yield each device's actions as the words that files use."""
    for device in range(schedule.num_devices):
        own = slice(schedule.start[device], schedule.start[device + 1])
        yield [
            f"{LETTERS[work]}{stage}.{microbatch}"
            for work, stage, microbatch in zip(
                schedule.work[own].tolist(),
                schedule.stage[own].tolist(),
                schedule.microbatch[own].tolist(),
                strict=True,
            )
        ]


def _actions(line: str, path: str) -> IntArray:
    rows = []
    for word in line.split():
        match = _ACTION.fullmatch(word)
        if match is None:
            raise InputFileError(
                f"{path} has {fields.shown(word)}",
                hint="expected words such as F0.3: a letter of F, B, I, W, stage, microbatch",
            )
        rows.append((LETTERS.index(match[1]), int(match[2]), int(match[3])))
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


def wrong_actions(schedule: Schedule) -> Iterator[Violation]:
    """Yield actions that are missing, occur twice, or are on a device without their stage."""
    stage, microbatch = schedule.stage, schedule.microbatch
    for name, values, stop in (
        ("stage", stage, schedule.num_stages),
        ("microbatch", microbatch, schedule.num_microbatches),
    ):
        # Indices beyond the end would fail below, so this comes first.
        if len(values) and values.max() >= stop:
            message = f"{name} {values.max()} does not exist, there are {stop}"
            yield Violation("schedule", message)
            return
    device = np.repeat(np.arange(schedule.num_devices), np.diff(schedule.start))
    astray = np.flatnonzero(schedule.device_of_stage[stage] != device)
    if len(astray):
        action = int(astray[0])
        own = schedule.device_of_stage[stage[action]]
        message = f"an action of stage {stage[action]} is on device {device[action]}, not on {own}"
        yield Violation("schedule", message)
    num_cells = schedule.num_stages * schedule.num_microbatches
    # A file may claim more microbatches than memory can hold counters for.
    if num_cells > len(stage):
        yield Violation(
            "schedule",
            f"{len(stage)} actions are too few for {schedule.num_stages} stages and "
            f"{schedule.num_microbatches} microbatches",
        )
        return
    # Every pair of stage and microbatch is counted by type of pass.
    cell = stage.astype(np.int64) * schedule.num_microbatches + microbatch
    times = {
        work: np.bincount(cell[schedule.work == work], minlength=num_cells) for work in StageWork
    }
    backward = times[StageWork.BACKWARD]
    for name, count in (
        ("forward", times[StageWork.FORWARD]),
        ("backward", backward + times[StageWork.INPUT_GRADIENT]),
        ("weight gradient", backward + times[StageWork.WEIGHT_GRADIENT]),
    ):
        bad = np.flatnonzero(count != 1)
        if len(bad):
            where = divmod(int(bad[0]), schedule.num_microbatches)
            message = (
                f"stage {where[0]} has the {name} of microbatch {where[1]} {count[bad[0]]} times, "
                "not once"
            )
            yield Violation("schedule", message)
