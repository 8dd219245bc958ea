"""Optimal recompute of a chain of stages within a number of bytes.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous
chains" (rotor), INRIA RR-9302, 2019: the least time for stages s to t in m slots of memory, with
the input of s stored, either keeps all of s and goes on behind it, or runs forward to a checkpoint
at some j, does j to t from there, and then s to j - 1 again. Optimal among schedules that keep what
they stored until its backward pass. O(stages³ · slots), compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel

Action = tuple[Literal["all", "checkpoint", "drop", "backward"], int]
"""What is done to a stage: forward with all of it kept, with its input kept, with nothing kept, or
backward."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Stages in the order of the forward pass; sizes in bytes."""

    forward_s: FloatArray
    backward_s: FloatArray
    output: LongArray
    """What the next stage reads."""
    kept: LongArray
    """All that the backward pass of the stage needs but its input; the output is part of it."""
    gradient: LongArray
    """Of the stage's output."""
    forward_work: LongArray
    """Held only while the forward pass of the stage runs."""
    backward_work: LongArray


@dataclass(frozen=True)
class ChainSchedule:
    """The least time and how it is reached."""

    seconds: float
    actions: tuple[Action, ...]


def schedule_chain(chain: Chain, budget_bytes: int, num_slots: int = 500) -> ChainSchedule | None:
    """The fastest schedule beside the chain's input; None where none fits.

    Sizes are rounded up to ``budget_bytes / num_slots``, so that the budget is kept.
    """
    unit = max(-(-budget_bytes // num_slots), 1)
    slots = budget_bytes // unit
    sizes = [
        -(-np.asarray(column, dtype=np.int64) // unit)
        for column in (chain.output, chain.kept, chain.gradient, chain.forward_work,
                       chain.backward_work)
    ]  # fmt: skip
    count = len(chain.forward_s)
    cost = np.full((count, count, slots + 1), np.inf)
    split = np.full((count, count, slots + 1), -2, dtype=np.int64)
    _fill(cost, split, np.asarray(chain.forward_s, dtype=np.float64),
          np.asarray(chain.backward_s, dtype=np.float64), *sizes)  # fmt: skip
    if not np.isfinite(cost[0, count - 1, slots]):
        return None
    actions: list[Action] = []
    _unfold(split, sizes[0], sizes[1], (0, count - 1, slots), actions)
    return ChainSchedule(float(cost[0, count - 1, slots]), tuple(actions))


@kernel
def _fill(
    cost: FloatArray,
    split: LongArray,
    forward_s: FloatArray,
    backward_s: FloatArray,
    output: LongArray,
    kept: LongArray,
    gradient: LongArray,
    forward_work: LongArray,
    backward_work: LongArray,
) -> None:
    """``cost[s, t, m]``, and where it splits: -1 for keeping all of s, j for a checkpoint at j."""
    count, num = cost.shape[0], cost.shape[2]
    for length in range(count):
        for first in range(count - length):
            last = first + length
            before = gradient[first - 1] if first > 0 else 0
            need = max(
                gradient[last] + kept[first] + forward_work[first],
                gradient[first] + before + kept[first] + backward_work[first],
            )
            for room in range(need, num):
                own_s = forward_s[first] + backward_s[first]
                if length == 0:
                    cost[first, last, room] = own_s
                    split[first, last, room] = -1
                elif room >= kept[first]:
                    inner = cost[first + 1, last, room - kept[first]] + own_s
                    if inner < cost[first, last, room]:
                        cost[first, last, room] = inner
                        split[first, last, room] = -1
            run_s = 0.0
            most = 0
            for at in range(first + 1, last + 1):
                run_s += forward_s[at - 1]
                held = output[at - 1] + forward_work[at - 1]
                if at - 1 > first:
                    held += output[at - 2]
                most = max(most, held)
                for room in range(gradient[last] + most, num):
                    if room < output[at - 1]:
                        continue
                    total = (
                        run_s + cost[at, last, room - output[at - 1]] + cost[first, at - 1, room]
                    )
                    if total < cost[first, last, room]:
                        cost[first, last, room] = total
                        split[first, last, room] = at


def _unfold(
    split: LongArray,
    output: LongArray,
    kept: LongArray,
    whole: tuple[int, int, int],
    actions: list[Action],
) -> None:
    """Write down the actions; a stack instead of calls, because chains may be long."""
    pending: list[tuple[int, int, int] | Action] = [whole]
    while pending:
        entry = pending.pop()
        if len(entry) == 2:
            actions.append(entry)
            continue
        first, last, room = entry
        at = int(split[first, last, room])
        if at == -1:
            actions.append(("all", first))
            pending.append(("backward", first))
            if last > first:
                pending.append((first + 1, last, room - int(kept[first])))
            continue
        actions.append(("checkpoint", first))
        actions += [("drop", stage) for stage in range(first + 1, at)]
        pending.append((first, at - 1, room))
        pending.append((at, last, room - int(output[at - 1])))
