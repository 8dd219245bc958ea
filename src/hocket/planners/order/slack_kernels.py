"""How late ops could start without making the step longer, compiled."""

from __future__ import annotations

from hocket.base.arrays import FloatArray, LongArray
from hocket.kernels import kernel
from hocket.simulate.instructions import Given, PlaceTable, RunTable, TransferTable


@kernel
def fill_latest(
    given: Given,
    runs: RunTable,
    places: PlaceTable,
    transfers: TransferTable,
    op_end_s: FloatArray,
    transfer_end_s: FloatArray,
    by_start: LongArray,
    arrival_s: FloatArray,
    free_s: FloatArray,
    latest_s: FloatArray,
    keeps_order: bool,
) -> None:
    """Latest start of every op, from the last to the first.

    ``by_start`` lists ops so that readers follow producers; ``free_s`` comes in with the end of
    the step for each queue, and moves forward if the ops of a queue are to keep their order.
    """
    for transfer in range(runs.send_ptr[len(runs.device)]):
        arrival_s[transfers.place[transfer]] = transfer_end_s[transfer]
    for index in range(len(by_start) - 1, -1, -1):
        op = by_start[index]
        limit_s = free_s[runs.queue[op]]
        for tensor in range(runs.made_ptr[op], runs.made_ptr[op + 1]):
            for user in range(given.user_ptr[tensor], given.user_ptr[tensor + 1]):
                read = given.user_read[user]
                place = places.read_place[read]
                sent_s = 0.0 if place == tensor else arrival_s[place] - op_end_s[op]
                limit_s = min(limit_s, latest_s[places.reader[read]] - sent_s)
        latest_s[op] = limit_s - runs.duration_s[op]
        if keeps_order:
            free_s[runs.queue[op]] = latest_s[op]
