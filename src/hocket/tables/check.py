"""Random schedules of the protocol, with a shard that dies: does every read hold what it must?

Each change of worker v in clock k adds 1 to cell (v, k) of a row, so a value tells which changes
it holds. A schedule is a random sequence of what may happen next: a worker reads, changes or
clocks; a client sends some of its changes; a message arrives; a shard sends some rows, writes a
checkpoint, dies (messages under way are lost or arrive late) and comes back. At every read of a
worker at clock c with staleness s it is checked that no change of clock c - s - 1 or older is
missing, that all own changes are there, and that none is there twice. At the end everything is
delivered: nobody may wait for ever, and the shard must hold every change exactly once.

What runs here are the functions that the transports run. About 80 microseconds per schedule.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from hocket.base.errors import CheckError
from hocket.tables.core.client import ClientState, new_client
from hocket.tables.core.message import HEAD
from hocket.tables.core.shard import new_shard
from hocket.tables.schedule import (
    LOST,
    NOT_ONCE,
    NUM_CLOCKS,
    NUM_ROWS,
    OLD_MISSING,
    OWN_MISSING,
    SLOTS,
    STUCK,
    CheckedWorld,
    Mailboxes,
    run_schedule,
)

FAULTS = {
    OLD_MISSING: "a read missed a change that is older than the staleness allows",
    OWN_MISSING: "a read missed a change of its own process",
    NOT_ONCE: "a read saw a change more often than it was made",
    STUCK: "a worker waits for ever",
    LOST: "the shard does not hold every change exactly once",
}


@dataclass(frozen=True)
class Arrangement:
    """Who takes part in a schedule, and under which rules."""

    num_clients: int
    workers_per_client: int
    staleness: int
    pushes: bool
    num_deaths: int
    promised: int | None = None
    """Check reads against another staleness than the one that they are made with."""


def arrangements() -> list[Arrangement]:
    """Every arrangement that is checked."""
    return [
        Arrangement(*each)
        for each in itertools.product((1, 2, 3), (1, 2), (0, 1, 2, 1000), (False, True), (0, 2))
        if not (each[2] == 1000 and not each[3])
    ]


def check_schedules(num_schedules: int, seed: int = 0) -> int:
    """Run random schedules over all arrangements; raises `CheckError` for the first fault."""
    each = -(-num_schedules // len(arrangements()))
    for number, arrangement in enumerate(arrangements()):
        fault, at = first_fault(arrangement, seed + number * each, each)
        if fault:
            raise CheckError(
                FAULTS[fault],
                where=f"{arrangement}, seed {at}",
                hint="first_fault(arrangement, seed, 1) repeats this schedule",
            )
    return each * len(arrangements())


def first_fault(arrangement: Arrangement, seed: int, num: int) -> tuple[int, int]:
    """The first fault among schedules with seeds from ``seed``, and its seed; 0 for none."""
    num_clients, per_client = arrangement.num_clients, arrangement.workers_per_client
    workers = num_clients * per_client
    promised = arrangement.promised
    promised = arrangement.staleness if promised is None else promised
    width = workers * NUM_CLOCKS
    shard = new_shard(num_clients, NUM_ROWS, width, pushes=arrangement.pushes)
    single = [
        new_client(k, NUM_ROWS, width, pushes=arrangement.pushes, num_lines=512, num_batches=512)
        for k in range(num_clients)
    ]
    members = ClientState(*(np.stack(arrays) for arrays in zip(*single, strict=True)))
    up, down = _channels(num_clients, width), _channels(num_clients, width)
    world = CheckedWorld(
        np.zeros((NUM_ROWS, workers, NUM_CLOCKS), np.int64), np.zeros(workers, np.int64),
        np.full(workers, -1, np.int64), np.full(num_clients, 1 << 60, np.int64),
        np.zeros((NUM_ROWS, width), np.float32), np.zeros(num_clients, np.int64),
        np.zeros(num_clients, np.int64), np.zeros(NUM_ROWS, np.int64),
        np.zeros(NUM_ROWS, np.int64), np.zeros((1, width), np.float32),
        np.array([arrangement.staleness, per_client, arrangement.num_deaths, promised]),
        np.zeros(1, np.uint64), np.zeros((1, width), np.float32),
    )  # fmt: skip
    # What the log and the channels hold beyond their counts does not matter.
    used = [*shard, *members[: ClientState._fields.index("log_row")], *up[3:], *down[3:], *world]
    pristine = [array.copy() for array in used]
    for at in range(seed, seed + num):
        for array, start in zip(used, pristine, strict=True):
            np.copyto(array, start)
        world.random[0] = (at * 0x9E3779B97F4A7C15 + 88172645463325252) % 2**64
        fault = run_schedule(shard, members, up, down, world)
        if fault:
            return int(fault), at
    return 0, seed + num


def _channels(num_clients: int, width: int) -> Mailboxes:
    return Mailboxes(
        np.zeros((num_clients, SLOTS, HEAD), np.int64),
        np.zeros((num_clients, SLOTS, NUM_ROWS), np.int64),
        np.zeros((num_clients, SLOTS, NUM_ROWS, width), np.float32),
        np.zeros(num_clients, np.int64),
        np.zeros(num_clients, np.int64),
    )
