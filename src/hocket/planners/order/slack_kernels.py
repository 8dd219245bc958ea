"""How late ops could start without making the step longer, compiled."""

from __future__ import annotations

from hocket.arrays import ByteArray, FloatArray
from hocket.kernels import kernel
from hocket.simulate.bench import Fixed
from hocket.simulate.tables import OpTable, PlaceTable, TransferTable


@kernel
def fill_latest(
    fixed: Fixed,
    ops: OpTable,
    places: PlaceTable,
    transfers: TransferTable,
    op_end_s: FloatArray,
    transfer_end_s: FloatArray,
    by_start: ByteArray,
    arrival_s: FloatArray,
    free_s: FloatArray,
    latest_s: FloatArray,
    keeps_order: bool,
) -> None:
    """Latest start of every op, from the last to the first.

    ``by_start`` lists ops so that readers follow producers; ``free_s`` comes in with the end of
    the step for each device, and moves forward if ops that share a device are to keep their order.
    """
    for transfer in range(ops.send_ptr[len(ops.device)]):
        arrival_s[transfers.place[transfer]] = transfer_end_s[transfer]
    for index in range(len(by_start) - 1, -1, -1):
        op = by_start[index]
        limit_s = free_s[ops.device[op]]
        for tensor in range(ops.made_ptr[op], ops.made_ptr[op + 1]):
            for user in range(fixed.user_ptr[tensor], fixed.user_ptr[tensor + 1]):
                read = fixed.user_read[user]
                place = places.read_place[read]
                sent_s = 0.0 if place == tensor else arrival_s[place] - op_end_s[op]
                limit_s = min(limit_s, latest_s[places.reader[read]] - sent_s)
        latest_s[op] = limit_s - ops.duration_s[op]
        if keeps_order:
            free_s[ops.device[op]] = latest_s[op]
