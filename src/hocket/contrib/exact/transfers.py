"""Transfers in the model: what is read on another device arrives later, in queues where it queues.

Without queues a tensor is on the way as soon as it is made, so an op waits for the maker's end and
the transfer's time. With queues each transfer is an interval in the sender's and in the receiver's
queue; where there are few enough of them, those of a queue also go in the order in which they
became ready, as the simulator sends them. For the shared mode the time alone on the way stands for
the time among others, which is never shorter.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from hocket.base.arrays import LongArray
from hocket.contrib.exact.instance import Read
from hocket.contrib.exact.model import Model

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import BoolVarT, IntervalVar, IntVar

MAX_PAIRS_IN_ORDER = 100_000
"""Above this many pairs of transfers, queues may serve in any order: a bound, perhaps not tight."""


@dataclass(frozen=True, eq=False)
class _Transfer:
    """One tensor to one device, from one of the devices on which it may be made."""

    tensor: int
    source: int
    src: int
    dst: int
    ticks: int
    present: BoolVarT
    start: IntVar


def add_transfers(model: Model) -> dict[tuple[int, int], IntVar]:
    """Ops wait for what they read; the start of each queued transfer by tensor and device."""
    if model.instance.problem.transfers == "queued":
        return _add_queued(model)
    for read in model.instance.reads:
        _add_direct(model, read, model.instance.transfer_ticks(read.tensor))
    return {}


def _made(model: Model, source: int) -> IntVar | int:
    return model.end[source] if source >= 0 else 0


def _add_direct(model: Model, read: Read, ticks: LongArray) -> None:
    cp, start, made = model.cp, model.start[read.reader], _made(model, read.source)
    home, reader = model.unit(read.home), model.unit(read.reader)
    if home == reader:
        cp.add(start >= made)
        return
    same = model.same_device(home, reader)
    between = ~np.eye(len(ticks), dtype=np.bool_)
    least = int(ticks[between].min()) if between.any() else 0
    cp.add(start >= made + least * (1 - same))
    for src, dst in np.argwhere(between & (ticks > least)).tolist():
        both = [model.place[home][src], model.place[reader][dst]]
        cp.add(start >= made + int(ticks[src, dst])).only_enforce_if(both)


def _add_queued(model: Model) -> dict[tuple[int, int], IntVar]:
    reads_of: dict[int, list[Read]] = {}
    for read in model.instance.reads:
        reads_of.setdefault(read.tensor, []).append(read)
    starts: dict[tuple[int, int], IntVar] = {}
    transfers = [
        transfer
        for tensor, reads in reads_of.items()
        for transfer in _transfers_of(model, tensor, reads, starts)
    ]
    _add_queues(model, transfers)
    return starts


def _transfers_of(
    model: Model, tensor: int, reads: list[Read], starts: dict[tuple[int, int], IntVar]
) -> list[_Transfer]:
    cp, source, home = model.cp, reads[0].source, model.unit(reads[0].home)
    for read in reads:
        cp.add(model.start[read.reader] >= _made(model, source))
    readers = frozenset(model.unit(read.reader) for read in reads) - {home}
    ticks = model.instance.transfer_ticks(tensor)
    found = []
    for dst in model.devices if readers else ():
        start = cp.new_int_var(0, model.horizon, f"start of tensor {tensor} to {dst}")
        starts[tensor, dst] = start
        cp.add(start >= _made(model, source))
        for src in model.devices:
            if src == dst:
                continue
            present = cp.new_bool_var(f"tensor {tensor} from {src} to {dst}")
            there = model.any_there(readers, dst)
            cp.add_min_equality(present, [model.place[home][src], there])
            found.append(_Transfer(tensor, source, src, dst, int(ticks[src, dst]), present, start))
            for read in reads:
                if model.unit(read.reader) != home:
                    both = [model.place[home][src], model.on(read.reader, dst)]
                    arrival = start + int(ticks[src, dst])
                    cp.add(model.start[read.reader] >= arrival).only_enforce_if(both)
    return found


def _add_queues(model: Model, transfers: list[_Transfer]) -> None:
    routes = model.instance.problem.costs.routes
    queues: dict[int, list[tuple[_Transfer, IntervalVar]]] = {}
    for transfer in transfers:
        interval = model.cp.new_optional_fixed_size_interval_var(
            transfer.start, transfer.ticks, transfer.present, "transfer"
        )
        for queue in (routes.send_queue[transfer.src], routes.receive_queue[transfer.dst]):
            queues.setdefault(int(queue), []).append((transfer, interval))
    for queue in queues.values():
        model.cp.add_no_overlap([interval for _, interval in queue])
    pairs = {
        (id(first), id(second)): (first, second)
        for queue in queues.values()
        for (first, _), (second, _) in combinations(queue, 2)
        if first.src == second.src or first.source != second.source or first.source < 0
    }
    if len(pairs) <= MAX_PAIRS_IN_ORDER:
        order: dict[tuple[int, int], BoolVarT] = {}
        for first, second in pairs.values():
            _add_order(model, order, first, second)


def _add_order(
    model: Model, order: dict[tuple[int, int], BoolVarT], first: _Transfer, second: _Transfer
) -> None:
    """What was ready first goes first; of one maker, by tensor and destination.

    What different makers make ready at one instant may go in either order.
    """
    cp = model.cp
    if first.source == second.source:
        if (first.tensor, first.dst) > (second.tensor, second.dst):
            first, second = second, first
        goes_first: list[BoolVarT] = []
    else:
        if first.source > second.source:
            first, second = second, first
        key = first.source, second.source
        if key not in order:
            order[key] = cp.new_bool_var(f"{key} in order")
            cp.add(_made(model, key[0]) <= _made(model, key[1])).only_enforce_if(order[key])
            cp.add(_made(model, key[1]) <= _made(model, key[0])).only_enforce_if(~order[key])
        goes_first = [order[key]]
        cp.add(first.start >= second.start + second.ticks).only_enforce_if(
            [~order[key], first.present, second.present]
        )
    cp.add(second.start >= first.start + first.ticks).only_enforce_if(
        [*goes_first, first.present, second.present]
    )
