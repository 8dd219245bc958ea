"""Optimal recompute of a chain of stages within a number of bytes.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova, "Optimal checkpointing for heterogeneous
chains" (rotor), INRIA RR-9302, 2019: the least time for stages s to t in m slots of memory, with
the input of s stored, either keeps all of s and goes on behind it, or runs forward to a checkpoint
at some j, does j to t from there, and then s to j - 1 again. One way is added: where the backward
pass of j - 1 needs nothing but its input and its output (a convolution with its activation), the
checkpoint may stay for it, and that stage does not run again. And a stage may be kept without what
is cheap to make again, and not all of one has to run for its backward pass, as in Rockmate (Zhao et
al., 2023). Optimal among such schedules.
O(stages³ · slots), compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hocket.base.arrays import FloatArray, IntArray, LongArray
from hocket.kernels import kernel

Action = tuple[Literal["all", "lean", "alone", "checkpoint", "drop", "free", "backward"], int]
"""What is done to a stage: forward with all of it kept, without what is cheap to make again, only
what its backward pass needs, with its input kept, or with its input dropped; its output freed;
backward."""
MOST_SLOTS = 400
MOST_ENTRIES = 10_000_000
"""Of the table, both halves together: 12 bytes each."""
_ALL = -1
"""Lean ways are -2, -3 and so on."""
_NEW, _REUSED = 0, 1
"""Tables: the output of the last stage is to be made, or is there already, beside the slots."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Stages in the order of the forward pass."""

    forward_s: FloatArray
    backward_s: FloatArray
    output_bytes: LongArray
    """What the next stage reads."""
    kept_bytes: LongArray
    """All that the backward pass of the stage needs but its input; the output is part of it."""
    gradient_bytes: LongArray
    """Of the stage's output."""
    forward_work_bytes: LongArray
    """Held only while the forward pass of the stage runs."""
    backward_work_bytes: LongArray
    """Likewise; negative where the gradient takes the place of what is not needed any more."""
    lean_bytes: LongArray | None = None
    """[way, stage]: what is kept of ``kept_bytes`` where the rest is cheap to make again."""
    lean_s: FloatArray | None = None
    """[way, stage]: seconds to make that again, before the backward pass; inf where there is no
    such way."""
    lean_ahead_bytes: LongArray | None = None
    """[way, stage]: the most of its own that it holds while it runs forward so; where not told, as
    if all were kept."""
    lean_back_bytes: LongArray | None = None
    """[way, stage]: likewise in its backward pass, gradients of input and output included."""
    alone_s: FloatArray | None = None
    """[way, stage]: seconds to make what its backward pass needs out of its input, where its output
    was there before and is not read any more."""
    alone_back_bytes: LongArray | None = None
    """[way, stage]: the most that is held then, gradients included."""
    passing_bytes: LongArray | None = None
    """The most of its own that a stage holds while it runs forward with nothing kept; where not
    told, its output and ``forward_work_bytes``."""

    @property
    def ahead_bytes(self) -> LongArray:
        """The most of its own that a stage holds while it runs forward with all kept."""
        return self.kept_bytes + self.forward_work_bytes

    @property
    def back_bytes(self) -> LongArray:
        """The most that is held in the backward pass of a stage, beside its input."""
        before = np.append(0, self.gradient_bytes[:-1])
        found: LongArray = self.gradient_bytes + before + self.kept_bytes + self.backward_work_bytes
        return found

    def ways(self) -> tuple[LongArray, FloatArray, LongArray, LongArray]:
        """[way, stage], all kept first: what is kept, seconds to make the rest again, and the most
        that is held forward and backward."""
        if self.lean_bytes is None or self.lean_s is None:
            no_s = np.zeros((1, len(self.kept_bytes)))
            return self.kept_bytes[None], no_s, self.ahead_bytes[None], self.back_bytes[None]
        aheads, backs, shape = self.lean_ahead_bytes, self.lean_back_bytes, self.lean_bytes.shape
        if aheads is None:
            aheads = np.broadcast_to(self.ahead_bytes, shape)
        if backs is None:
            backs = np.broadcast_to(self.back_bytes, shape)
        return (
            np.vstack([self.kept_bytes, self.lean_bytes]),
            np.vstack([np.zeros(len(self.kept_bytes)), self.lean_s]),
            np.vstack([self.ahead_bytes, aheads]),
            np.vstack([self.back_bytes, backs]),
        )


@dataclass(frozen=True)
class ChainSchedule:
    """The least time and how it is reached."""

    seconds: float
    actions: tuple[Action, ...]


def schedule_chain(
    chain: Chain, budget_bytes: int, num_slots: int | None = None
) -> ChainSchedule | None:
    """The fastest schedule beside the chain's input; None where none fits.

    Sizes are rounded up to ``budget_bytes / num_slots``, so that the budget is kept; fewer slots
    where the chain is long.
    """
    count = len(chain.forward_s)
    if num_slots is None:
        num_slots = min(MOST_SLOTS, MOST_ENTRIES // (2 * count * count) + 1)
    unit = max(-(-budget_bytes // num_slots), 1)
    slots = budget_bytes // unit

    def in_slots(column: LongArray) -> LongArray:
        return -(-np.asarray(column, dtype=np.int64) // unit)

    left, again_s, ahead, back = chain.ways()
    passing = chain.passing_bytes
    if passing is None:
        passing = chain.output_bytes + chain.forward_work_bytes
    output, kept = in_slots(chain.output_bytes), in_slots(left)
    cost = np.full((2, count, count, slots + 1), np.inf)
    split = np.full((2, count, count, slots + 1), _ALL, dtype=np.int32)
    # Asked of the bytes: sizes in slots are rounded.
    suffices = np.asarray(chain.kept_bytes == chain.output_bytes, dtype=np.int64)
    alone_s = np.zeros((0, count)) if chain.alone_s is None else chain.alone_s
    alone_back = np.zeros((0, count), dtype=np.int64)
    alone_back = alone_back if chain.alone_back_bytes is None else chain.alone_back_bytes
    _fill(cost, split, suffices, np.asarray(chain.forward_s, dtype=np.float64),
          np.asarray(chain.backward_s, dtype=np.float64), output, in_slots(chain.gradient_bytes),
          in_slots(passing), kept, np.asarray(again_s, dtype=np.float64), in_slots(ahead),
          in_slots(back), np.asarray(alone_s, dtype=np.float64), in_slots(alone_back))  # fmt: skip
    seconds = float(cost[_NEW, 0, count - 1, slots])
    if not np.isfinite(seconds):
        return None
    return ChainSchedule(seconds, _unfolded(split, output, kept, count, slots))


@kernel
def _fill(
    cost: FloatArray,
    split: IntArray,
    suffices: LongArray,
    forward_s: FloatArray,
    backward_s: FloatArray,
    output: LongArray,
    gradient: LongArray,
    passing: LongArray,
    kept: LongArray,
    again_s: FloatArray,
    ahead: LongArray,
    back: LongArray,
    alone_s: FloatArray,
    alone_back: LongArray,
) -> None:
    """``cost[table, s, t, m]``, and how: a way of keeping s, or of making what its backward pass
    needs, or twice the j of the checkpoint, plus one where it then serves as the output of j - 1,
    for which that ``suffices``."""
    count, num = cost.shape[1], cost.shape[3]
    for length in range(count):
        for first in range(count - length):
            last = first + length
            for table in range(2):
                # What lies beside the slots comes back once the last stage is through.
                beside = output[last] if table == 1 else 0
                own_s = forward_s[first] + backward_s[first]
                if length == 0 and table == 1:
                    if suffices[first]:
                        for room in range(max(back[0, first] - beside, 0), num):
                            cost[1, first, last, room] = backward_s[first]
                            split[1, first, last, room] = _ALL
                    continue
                for way in range(len(kept)):
                    left = kept[way, first]
                    most = max(gradient[last] + ahead[way, first], back[way, first] - beside, left)
                    for room in range(most, num):
                        took_s = own_s + again_s[way, first]
                        if length > 0:
                            took_s += cost[table, first + 1, last, room - left]
                        if took_s < cost[table, first, last, room]:
                            cost[table, first, last, room] = took_s
                            split[table, first, last, room] = _ALL - way
                if length == 0 and last < count - 1:
                    for way in range(len(alone_s)):
                        for room in range(alone_back[way, first], num):
                            took_s = alone_s[way, first] + backward_s[first]
                            if took_s < cost[table, first, last, room]:
                                cost[table, first, last, room] = took_s
                                split[table, first, last, room] = _ALL - len(kept) - way
                run_s = 0.0
                most = 0
                for at in range(first + 1, last + 1):
                    size = output[at - 1]
                    run_s += forward_s[at - 1]
                    held = passing[at - 1]
                    if at - 1 > first:
                        held += output[at - 2]
                    most = max(most, held)
                    for room in range(max(gradient[last] + most, size), num):
                        right = cost[table, at, last, room - size]
                        after = min(room + beside, num - 1)
                        left_s = cost[0, first, at - 1, after]
                        reused = 0
                        if after >= size and cost[1, first, at - 1, after - size] < left_s:
                            left_s = cost[1, first, at - 1, after - size]
                            reused = 1
                        if run_s + right + left_s < cost[table, first, last, room]:
                            cost[table, first, last, room] = run_s + right + left_s
                            split[table, first, last, room] = 2 * at + reused


def _unfolded(
    split: IntArray,
    output: LongArray,
    kept: LongArray,
    count: int,
    slots: int,
) -> tuple[Action, ...]:
    """The actions; a stack instead of calls, because chains may be long."""
    actions: list[Action] = []
    pending: list[tuple[int, int, int, int] | Action] = [(_NEW, 0, count - 1, slots)]
    while pending:
        entry = pending.pop()
        if len(entry) == 2:
            actions.append(entry)
            continue
        table, first, last, room = entry
        choice = int(split[table, first, last, room])
        if choice < 0:
            if table == _NEW or last > first:
                is_alone = choice < _ALL - len(kept) + 1
                actions.append(
                    ("all" if choice == _ALL else "alone" if is_alone else "lean", first)
                )
            pending.append(("backward", first))
            if last > first:
                left = int(kept[_ALL - choice, first])
                pending.append((table, first + 1, last, room - left))
            continue
        at, is_reused = divmod(choice, 2)
        actions.append(("checkpoint", first))
        actions += [("drop", stage) for stage in range(first + 1, at)]
        size = int(output[at - 1])
        beside = int(output[last]) if table == _REUSED else 0
        after = min(room + beside, slots)
        if is_reused:
            pending.append((_REUSED, first, at - 1, after - size))
        else:
            pending.append((_NEW, first, at - 1, after))
            pending.append(("free", at - 1))
        pending.append((table, at, last, room - size))
    return tuple(actions)
