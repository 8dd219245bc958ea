"""The worker's side of a worker group: connection to the parent, heartbeat, exit with the parent.

`live` must be called first. The first command-line argument lists five numbers: descriptors of the
incoming and outgoing frames, of the heartbeat memory, of a pipe that closes when the parent exits,
and the parent's process id.
"""

from __future__ import annotations

import io
import mmap
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from hocket.base.errors import one_line
from hocket.processes.frames import Frame, FrameReader, FrameWriter
from hocket.processes.heartbeat import BEAT_S, Heartbeat
from hocket.processes.system import die_with

_FAILED = 1


class Parent:
    """Connection of a worker to the process that started it."""

    def __init__(self, reader: FrameReader, writer: FrameWriter, progress: Heartbeat) -> None:
        self._reader, self._writer, self._progress = reader, writer, progress

    def receive(self) -> Frame | None:
        """Next message; None after the last one."""
        return self._reader.read()

    def send(self, header: dict[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Send a message; returns when it is written."""
        self._writer.put(header, buffers)
        self._writer.flush()

    def move(self, step: int) -> None:
        """Record the current step, which error messages name if this process dies."""
        self._progress.move(step)


def live(work: Callable[[Parent], None]) -> NoReturn:
    """Run ``work`` in this process and exit; errors are reported to the parent."""
    inbox, outbox, memory, life, parent_id = map(int, sys.argv.pop(1).split(","))
    if sys.platform == "linux":
        die_with(parent_id)
    progress = Heartbeat(mmap.mmap(memory, Heartbeat.SIZE))
    threading.Thread(target=_show_life, args=(progress, life), daemon=True).start()
    _write_whole_lines()
    code = _do(work, Parent(FrameReader(inbox), FrameWriter(outbox), progress))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # os._exit, because a normal exit would wait for threads of libraries that wait for other ranks.
    os._exit(code)


def _write_whole_lines() -> None:
    """Write whole lines, so that the output of concurrent processes is not mixed within a line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def serve(answer: Callable[[Frame], tuple[dict[str, Any], Sequence[Any]]]) -> NoReturn:
    """Answer the parent's messages one by one until the parent closes the connection."""

    def work(parent: Parent) -> None:
        while (frame := parent.receive()) is not None:
            parent.send(*answer(frame))

    live(work)


def _do(work: Callable[[Parent], None], parent: Parent) -> int:
    try:
        work(parent)
        parent.send({"what": "done"})
    except BrokenPipeError:
        # The parent has closed the connection or is gone, so nobody can receive a report.
        return _FAILED
    # The user's code may raise anything; the parent reports it with its message.
    except Exception as error:
        kind = getattr(error, "code", "")
        parent.send({"what": "error", "kind": kind, "message": one_line(error)})
        return _FAILED
    return 0


def _show_life(progress: Heartbeat, life: int) -> None:
    while True:
        progress.beat(time.monotonic())
        readable, _, _ = select.select([life], [], [], BEAT_S)
        if readable:
            os._exit(_FAILED)
