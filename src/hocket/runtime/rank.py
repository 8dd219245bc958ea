"""The program of one rank: ``python -m hocket.runtime.rank`` with four file descriptors.

It reads what to do from the first, writes what happened to the second, and writes a sign of life
and its position into the memory behind the third. The fourth is only held: when it closes, the
process that started the run is gone, and the rank ends at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

from hocket.runtime.progress import BEAT_S, Progress

if TYPE_CHECKING:
    from hocket.runtime.ranks import RankRunner
    from hocket.runtime.record import StepRecord

_SET_PARENT_DEATH_SIGNAL = 1
_FAILED = 1

Header = dict[str, Any]
CarryOut = Callable[[Header, list[bytearray], Progress, BinaryIO], None]
"""Does what a header says, and writes what happened as frames."""


def main(carry_out: CarryOut | None = None) -> None:
    """Run until the last step is done; other kinds of ranks say how they are carried out."""
    spec_fd, result_fd, progress_fd, life_fd = (int(text) for text in sys.argv[1:5])
    _die_with_parent()
    progress = Progress(mmap.mmap(progress_fd, Progress.SIZE))
    threading.Thread(target=_live, args=(progress, life_fd), daemon=True).start()
    with os.fdopen(spec_fd, "rb", buffering=0) as spec, os.fdopen(result_fd, "wb") as results:
        # The end of the interpreter would wait for threads of the backend that wait for others.
        os._exit(_run(spec, results, progress, carry_out or _carry_out))


def _die_with_parent() -> None:
    """On Linux the kernel itself ends a rank whose parent was killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def _live(progress: Progress, life_fd: int) -> None:
    while True:
        progress.beat(time.monotonic())
        readable, _, _ = select.select([life_fd], [], [], BEAT_S)
        if readable:
            os._exit(_FAILED)


def _run(spec: BinaryIO, results: BinaryIO, progress: Progress, carry_out: CarryOut) -> int:
    from hocket.runtime.wire import read_frame, write_frame

    frame = read_frame(spec)
    if frame is None:
        return _FAILED
    header, buffers = frame
    try:
        carry_out(header, buffers, progress, results)
        write_frame(results, {"what": "done"})
    # Whatever an op of a stranger's model raises is told, with its message, by the parent.
    except Exception as error:
        from hocket.runtime.worker import one_line

        kind = getattr(error, "code", "")
        write_frame(results, {"what": "error", "kind": kind, "message": one_line(error)})
        return _FAILED
    return 0


def _carry_out(
    header: Header, buffers: list[bytearray], progress: Progress, results: BinaryIO
) -> None:
    runner = _prepare(header, buffers, progress)
    # Its tensors are copies: without this every parameter would be there twice.
    buffers.clear()
    for number in range(1, header["steps"] + 1):
        record = runner.step(number)
        _report(results, header, number, record, runner)
    if header["wants_results"]:
        _report_results(results, runner)


def _prepare(header: Header, buffers: list[bytearray], progress: Progress) -> RankRunner:
    import torch

    from hocket.runtime.connect import join_group
    from hocket.runtime.lanes import new_lane
    from hocket.runtime.peer import Peer
    from hocket.runtime.ranks import RankRunner
    from hocket.runtime.split import Do, Instruction
    from hocket.runtime.wire import decode_call, decode_spec, from_raw
    from hocket.runtime.worker import Worker

    torch.set_num_threads(header["threads"])
    device = torch.device(header["device"])
    specs = {tensor: decode_spec(data) for tensor, data in header["specs"]}
    flat = [from_raw(data) for data in buffers]
    num_storages = len(header["storages"])
    storages = dict(zip(header["storages"], flat[:num_storages], strict=True))
    constants = [
        data.view(getattr(torch, dtype)).view(shape)
        for (dtype, shape), data in zip(header["constants"], flat[num_storages:], strict=True)
    ]
    calls = {op: decode_call(data, constants) for op, data in header["calls"]}
    lane = new_lane(device)
    worker = Worker(calls, specs, dict(header["draws"]), device, header["seed"])
    worker.load(header["present"], storages)
    join_group(header, device)
    return RankRunner(
        worker,
        lane,
        [Instruction(Do(do), number) for do, number in header["instructions"]],
        {number: Peer(*peer) for number, peer in header["peers"]},
        device_index=header["device_index"],
        slowdown=header["slowdown"],
        progress=progress.move,
    )


def _report(
    results: BinaryIO, header: Header, number: int, record: StepRecord, runner: RankRunner
) -> None:
    from hocket.runtime.wire import write_frame

    loss = header["loss"]
    if loss is not None:
        record.loss = float(runner.worker.held[loss])
    plain, arrays = record.to_arrays()
    write_frame(results, {"what": "step", "number": number, "record": plain}, arrays)


def _report_results(results: BinaryIO, runner: RankRunner) -> None:
    from hocket.runtime.package import pack
    from hocket.runtime.wire import raw, write_frame

    worker = runner.worker
    found = {t: value for t, value in worker.held.items() if worker.specs[t].layout is not None}
    write_frame(
        results,
        {"what": "results", "tensors": list(found)},
        [raw(pack(value, worker.specs[tensor], whole=False)) for tensor, value in found.items()],
    )


if __name__ == "__main__":
    main()
