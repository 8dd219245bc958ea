"""Promptness in the model: an op starts the moment it can, as the simulator starts it.

Where transfers queue, an op that waits on purpose could let another's tensor go first, and where
memory is scarce it could let bytes be released first; no plan can say that, so schedules which do
are left out. Each op must start at time 0, when something that it
reads arrives, or when another op of its device ends. Times that were rounded down can differ by one
tick from the rounded moment of their cause, and are allowed to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hocket.contrib.exact.instance import Read
from hocket.contrib.exact.model import Model

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import BoolVarT, IntVar

MAX_OPS = 48
"""Above this the pairs of ops cost the solver more than they tell it."""


def add_promptness(model: Model, transfer_start: dict[tuple[int, int], IntVar]) -> None:
    """Every op has a cause for its start."""
    num_ops = len(model.start)
    if num_ops > MAX_OPS:
        return
    reads_of: list[list[Read]] = [[] for _ in range(num_ops)]
    for read in model.instance.reads:
        reads_of[read.reader].append(read)
    for op, reads in enumerate(reads_of):
        at_once = model.cp.new_bool_var(f"op {op} at once")
        model.cp.add(model.start[op] == 0).only_enforce_if(at_once)
        causes: list[BoolVarT] = [at_once]
        causes += [_after_read(model, read, transfer_start) for read in reads]
        causes += [_after_op(model, op, other) for other in range(num_ops) if other != op]
        model.cp.add_bool_or(causes)


def _after_op(model: Model, op: int, other: int) -> BoolVarT:
    cp, slack = model.cp, model.instance.slack_ticks
    cause = cp.new_bool_var(f"op {op} after {other}")
    if model.unit(op) != model.unit(other):
        cp.add_implication(cause, model.same_device(model.unit(op), model.unit(other)))
    cp.add(model.start[op] >= model.end[other]).only_enforce_if(cause)
    cp.add(model.start[op] <= model.end[other] + slack).only_enforce_if(cause)
    return cause


def _after_read(
    model: Model, read: Read, transfer_start: dict[tuple[int, int], IntVar]
) -> BoolVarT:
    cp, slack, start = model.cp, model.instance.slack_ticks, model.start[read.reader]
    made = model.end[read.source] if read.source >= 0 else 0
    cause = cp.new_bool_var(f"op {read.reader} after tensor {read.tensor}")
    home, reader = model.unit(read.home), model.unit(read.reader)
    if home == reader:
        cp.add(start <= made + slack).only_enforce_if(cause)
        return cause
    cp.add(start <= made + slack).only_enforce_if([cause, model.same_device(home, reader)])
    ticks = model.instance.transfer_ticks(read.tensor).tolist()
    for src in model.devices:
        for dst in model.devices:
            if src == dst:
                continue
            sent = transfer_start.get((read.tensor, dst), made)
            both = [model.place[home][src], model.place[reader][dst]]
            cp.add(start <= sent + ticks[src][dst] + slack).only_enforce_if([cause, *both])
    return cause
