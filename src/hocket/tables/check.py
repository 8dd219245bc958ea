"""Model check of the protocol: random schedules with a shard that dies, every read checked.

Each change of worker v in clock k adds 1 to cell (v, k) of a row, so a value shows which changes it
contains. A schedule is a random sequence of events: a worker reads, changes a row or ends a clock;
a client sends some of its changes; a message arrives; a shard sends some rows, writes a checkpoint,
dies (messages in flight are lost or arrive late) or restarts. Every read of a worker at clock c
with staleness s is checked: no change of clock c - s - 1 or older may be missing, all own changes
must be included, and no change may be included twice. At the end all messages are delivered. Then
no worker may still be waiting, and the shard must contain every change exactly once.

The checked functions are those that the transports run. About 80 microseconds per schedule.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hocket.base.arrays import LongArray
from hocket.base.errors import CheckError
from hocket.kernels import kernel
from hocket.tables.core.client import (
    BASE,
    END,
    ME,
    MY_CLOCK,
    MY_LIFE,
    MY_PUSHES,
    NEXT,
    ClientState,
    ask_again,
    batch_head,
    batch_start,
    change_rows,
    find_missing,
    mark_asked,
    new_client,
    newest_clock,
    read_rows,
    send_changes,
    take_restored,
    take_rows,
)
from hocket.tables.core.message import (
    ASK,
    CLIENT,
    COUNT,
    EPOCH,
    HEAD,
    KIND,
    NEED,
    PING,
    RESTORED,
    Cells,
    Message,
)
from hocket.tables.core.shard import (
    LIFE,
    ShardState,
    new_shard,
    shard_head,
    shard_restore,
    shard_send,
    shard_take,
)

# One random schedule of the protocol as compiled code, so that millions of schedules are
# affordable. At the end all actions are repeated in a fixed order until every message is delivered.

NUM_ROWS, NUM_CLOCKS, SLOTS, STEPS, MAX_ROUNDS = 2, 4, 48, 150, 400
ROUND = (0, 0, 23, 11, 11, 11, 11, 21, 16, 16, 16, 16, 16, 16, 7, 7)
"""Actions at the end, in this order: work, ping, deliver to the shard, push, deliver to clients,
send.
"""
OLD_MISSING, OWN_MISSING, NOT_ONCE, STUCK, LOST = range(1, 6)


class Mailboxes(NamedTuple):
    """Messages in flight by [client, slot], with the first slot and the count per client."""

    head: NDArray[np.int64]
    rows: NDArray[np.int64]
    cells: NDArray[np.float32]
    first: LongArray
    num: LongArray


class ScheduleRun(NamedTuple):
    """State of the checker, which the protocol does not read."""

    made: NDArray[np.int64]
    """[row, worker, clock] number of changes made."""
    clock: LongArray
    """[worker] clock of the worker."""
    wants: LongArray
    """[worker] row for which the worker waits, or -1."""
    resend: LongArray
    """[client] next batch to resend."""
    saved_cells: Cells
    saved_applied: LongArray
    saved_clocks: LongArray
    rows: LongArray
    more: LongArray
    one: Cells
    rules: LongArray
    """Staleness, workers per client, deaths left, and the staleness against which reads are
    checked.
    """
    random: NDArray[np.uint64]
    read: Cells


@kernel
def _load(shard: ShardState, run: ScheduleRun, epoch: int) -> None:
    """Reset the shard to its last checkpoint."""
    _copy(shard.cells, shard.applied, shard.clocks,
          run.saved_cells, run.saved_applied, run.saved_clocks)  # fmt: skip
    shard_restore(shard, epoch)


@kernel
def _copy(
    cells: Cells, applied: LongArray, clocks: LongArray,
    old_cells: Cells, old_applied: LongArray, old_clocks: LongArray,
) -> None:  # fmt: skip
    for k in range(len(applied)):
        applied[k], clocks[k] = old_applied[k], old_clocks[k]
    for row in range(cells.shape[0]):
        for j in range(cells.shape[1]):
            cells[row, j] = old_cells[row, j]


@kernel
def _member(members: ClientState, client: int) -> ClientState:
    """State of one client, as views of the arrays of all clients."""
    return ClientState(
        members.facts[client], members.rate[client], members.cells[client],
        members.row_clock[client], members.subscribed[client], members.asked[client],
        members.pending[client], members.oldest[client], members.unsent[client],
        members.importance[client],
        members.last[client], members.log_row[client], members.log_before[client],
        members.log_version[client], members.log_cells[client], members.batch_end[client],
        members.batch_clock[client],
    )  # fmt: skip


@kernel
def _below(run: ScheduleRun, bound: int) -> int:
    """A random number below ``bound`` (xorshift64*)."""
    x = run.random[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    run.random[0] = x
    return int(np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(33)) % bound)


@kernel
def _place(channels: Mailboxes, client: int) -> Message:
    """Reserve the next free slot of a client."""
    slot = (channels.first[client] + channels.num[client]) % SLOTS
    channels.num[client] += 1
    return Message(
        channels.head[client, slot], channels.rows[client, slot], channels.cells[client, slot]
    )


@kernel
def _taken(channels: Mailboxes, client: int) -> Message:
    """Remove and return the client's next message."""
    slot = channels.first[client]
    channels.first[client] = (slot + 1) % SLOTS
    channels.num[client] -= 1
    return Message(
        channels.head[client, slot], channels.rows[client, slot], channels.cells[client, slot]
    )


# ── what may happen ─────────────────────────────────────────────────────────────────────────────


@kernel
def run_schedule(
    shard: ShardState,
    members: ClientState,
    up: Mailboxes,
    down: Mailboxes,
    run: ScheduleRun,
) -> int:
    """Run random actions, then all actions in turn until everything is delivered."""
    num_clients = len(up.first)
    num_random = STEPS * num_clients
    for step in range(num_random + MAX_ROUNDS * num_clients * len(ROUND)):
        at_random = step < num_random
        client, action = _below(run, num_clients), _below(run, 24)
        worker = _below(run, run.rules[1])
        if not at_random:
            turn, place = (step - num_random) // len(ROUND), (step - num_random) % len(ROUND)
            client, action = turn % num_clients, ROUND[place]
            worker = turn // num_clients % run.rules[1]
            if place == 0 and _is_complete(shard, run):
                return 0
        fault = 0
        if action < 7:
            fault = _work(members, up, run, client * run.rules[1] + worker, at_random)
        elif action < 11:
            _send(members, up, run, client, not at_random)
        elif action < 16:
            _arrive_up(shard, up, down, client)
        elif action < 21:
            _arrive_down(members, up, down, run, client)
        elif action < 23:
            _push(shard, down, run, client, not at_random)
        else:
            _seldom(shard, members, up, down, run, client, at_random)
        if fault:
            return fault
    for worker in range(len(run.clock)):
        if run.clock[worker] < NUM_CLOCKS:
            return STUCK
    return LOST


@kernel
def _work(
    members: ClientState, up: Mailboxes, run: ScheduleRun, worker: int, at_random: bool
) -> int:
    """Let a worker read, change a row or end its clock; a waiting worker retries its read."""
    client = worker // run.rules[1]
    one = _member(members, client)
    clock = run.clock[worker]
    if clock == NUM_CLOCKS:
        return 0
    choice = _below(run, 4)
    # A waiting worker can do nothing else, as in `Table.get`.
    if run.wants[worker] >= 0 or choice == 0:
        if run.wants[worker] < 0:
            run.wants[worker] = _below(run, NUM_ROWS)
        return _read(one, up, run, worker)
    # No new changes at the end, so that everything can be delivered.
    if choice < 3 and at_random:
        row = _below(run, NUM_ROWS)
        run.one[:] = 0
        run.one[0, worker * NUM_CLOCKS + clock] = 1
        run.rows[0] = row
        change_rows(one, clock, run.rows[:1], run.one)
        run.made[row, worker, clock] += 1
        return 0
    run.clock[worker] += 1
    slowest = run.clock[worker]
    for other in range(client * run.rules[1], (client + 1) * run.rules[1]):
        slowest = min(slowest, run.clock[other])
    one.facts[MY_CLOCK] = slowest
    return 0


@kernel
def _read(one: ClientState, up: Mailboxes, run: ScheduleRun, worker: int) -> int:
    row, client = run.wants[worker], worker // run.rules[1]
    clock, staleness = run.clock[worker], run.rules[0]
    need = max(0, clock - staleness)
    run.rows[0] = row
    if find_missing(one, run.rows[:1], need, run.more) > 0:
        if one.facts[MY_LIFE] == 0:
            _ping(one, up, client)
        elif up.num[client] < SLOTS and mark_asked(one, run.more, 1, need, run.rows):
            _ask(one, _place(up, client), run.rows, 1, need)
        return 0
    run.wants[worker] = -1
    read_rows(one, run.rows[:1], run.read)
    for other in range(len(run.clock)):
        for k in range(NUM_CLOCKS):
            seen, made = run.read[0, other * NUM_CLOCKS + k], run.made[row, other, k]
            if seen > made:
                return NOT_ONCE
            if seen < made and k < clock - run.rules[3]:
                return OLD_MISSING
            if seen < made and other // run.rules[1] == client:
                return OWN_MISSING
    return 0


@kernel
def _ask(one: ClientState, out: Message, rows: LongArray, num: int, need: int) -> None:
    out.head[:] = 0
    out.head[KIND], out.head[CLIENT], out.head[EPOCH] = ASK, one.facts[ME], one.facts[MY_LIFE]
    out.head[NEED], out.head[COUNT] = need, num
    for i in range(num):
        out.rows[i] = rows[i]


@kernel
def _ping(one: ClientState, up: Mailboxes, client: int) -> None:
    if up.num[client] < SLOTS:
        out = _place(up, client)
        out.head[:] = 0
        out.head[KIND], out.head[CLIENT], out.head[EPOCH] = PING, client, one.facts[MY_LIFE]


@kernel
def _send(
    members: ClientState, up: Mailboxes, run: ScheduleRun, client: int, all_rows: bool
) -> None:
    """Let a client resend a batch, or send some of its changes for the first time."""
    one = _member(members, client)
    # Before the shard has answered, a client does not know the epoch to which messages belong.
    if up.num[client] >= SLOTS or one.facts[MY_LIFE] == 0:
        return
    if run.resend[client] < one.facts[NEXT]:
        out = _place(up, client)
        version = run.resend[client]
        batch_head(one, version, out.head)
        _copy_lines(one, batch_start(one, version), out)
        run.resend[client] += 1
        return
    count = 0
    for row in range(NUM_ROWS):
        if all_rows or _below(run, 2):
            run.rows[count] = row
            count += 1
    out = _place(up, client)
    num = send_changes(one, run.rows[:count], out.head)
    _copy_lines(one, one.facts[END] - num, out)


@kernel
def _copy_lines(one: ClientState, start: int, out: Message) -> None:
    for i in range(out.head[COUNT]):
        line = start - one.facts[BASE] + i
        out.rows[i] = one.log_row[line]
        for j in range(one.log_cells.shape[1]):
            out.cells[i, j] = one.log_cells[line, j]


@kernel
def _arrive_up(shard: ShardState, up: Mailboxes, down: Mailboxes, client: int) -> None:
    if up.num[client] == 0 or down.num[client] >= SLOTS:
        return
    if not shard_take(shard, _taken(up, client)):
        shard_head(shard, client, RESTORED, _place(down, client).head)


@kernel
def _arrive_down(
    members: ClientState,
    up: Mailboxes,
    down: Mailboxes,
    run: ScheduleRun,
    client: int,
) -> None:
    if down.num[client] == 0 or up.num[client] >= SLOTS:
        return
    one = _member(members, client)
    message = _taken(down, client)
    if message.head[KIND] != RESTORED:
        take_rows(one, message)
        return
    is_new = one.facts[MY_LIFE] != message.head[EPOCH]
    run.resend[client] = take_restored(one, message.head)
    if is_new and one.facts[MY_PUSHES]:
        count = ask_again(one, run.rows)
        if count:
            _ask(one, _place(up, client), run.rows, count, newest_clock(one))


@kernel
def _push(
    shard: ShardState, down: Mailboxes, run: ScheduleRun, client: int, all_rows: bool
) -> None:
    """Let the shard send some of the rows that it may send, or only its clock."""
    if down.num[client] >= SLOTS:
        return
    count = 0
    for row in range(NUM_ROWS):
        if all_rows or _below(run, 2):
            run.rows[count] = row
            count += 1
    shard_send(shard, client, run.rows[:count], _place(down, client))


@kernel
def _seldom(
    shard: ShardState, members: ClientState, up: Mailboxes, down: Mailboxes, run: ScheduleRun,
    client: int, at_random: bool,
) -> None:  # fmt: skip
    """Run a rare action: a checkpoint, a ping, or the death of the shard."""
    choice = _below(run, 3) if at_random else 0
    if choice == 0:
        _ping(_member(members, client), up, client)
    elif choice == 1:
        _copy(run.saved_cells, run.saved_applied, run.saved_clocks,
              shard.cells, shard.applied, shard.clocks)  # fmt: skip
        for k in range(len(shard.applied)):
            shard.durable[k] = shard.applied[k]
    elif run.rules[2] > 0:
        run.rules[2] -= 1
        _load(shard, run, shard.facts[LIFE] + 1)
        for other in range(len(up.num)):
            if _below(run, 2):
                up.num[other] = 0
            if _below(run, 2):
                down.num[other] = 0


@kernel
def _is_complete(shard: ShardState, run: ScheduleRun) -> bool:
    for worker in range(len(run.clock)):
        if run.clock[worker] < NUM_CLOCKS:
            return False
        for row in range(NUM_ROWS):
            for k in range(NUM_CLOCKS):
                place = worker * NUM_CLOCKS + k
                if shard.cells[row, place] != run.made[row, worker, k]:
                    return False
    return True


FAULTS = {
    OLD_MISSING: "a read missed a change that is older than the staleness allows",
    OWN_MISSING: "a read missed a change of its own process",
    NOT_ONCE: "a read saw a change more often than it was made",
    STUCK: "a worker waits for ever",
    LOST: "the shard does not hold every change exactly once",
}


@dataclass(frozen=True)
class Arrangement:
    """Clients, workers, rules and shard deaths of a schedule."""

    num_clients: int
    workers_per_client: int
    staleness: int
    pushes: bool
    num_deaths: int
    promised: int | None = None
    """Staleness against which reads are checked, if it differs from the table's."""


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
    """First fault among ``num`` schedules with seeds from ``seed`` on, and its seed; fault 0 if
    none.
    """
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
    run = ScheduleRun(
        np.zeros((NUM_ROWS, workers, NUM_CLOCKS), np.int64), np.zeros(workers, np.int64),
        np.full(workers, -1, np.int64), np.full(num_clients, 1 << 60, np.int64),
        np.zeros((NUM_ROWS, width), np.float32), np.zeros(num_clients, np.int64),
        np.zeros(num_clients, np.int64), np.zeros(NUM_ROWS, np.int64),
        np.zeros(NUM_ROWS, np.int64), np.zeros((1, width), np.float32),
        np.array([arrangement.staleness, per_client, arrangement.num_deaths, promised]),
        np.zeros(1, np.uint64), np.zeros((1, width), np.float32),
    )  # fmt: skip
    # Entries of the log and the channels beyond their counts are never read, so they need no reset.
    used = [*shard, *members[: ClientState._fields.index("log_row")], *up[3:], *down[3:], *run]
    pristine = [array.copy() for array in used]
    for at in range(seed, seed + num):
        for array, start in zip(used, pristine, strict=True):
            np.copyto(array, start)
        run.random[0] = (at * 0x9E3779B97F4A7C15 + 88172645463325252) % 2**64
        fault = run_schedule(shard, members, up, down, run)
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
