"""A group of worker processes, and the event loop that exchanges messages with them.

Everything runs in the calling thread. Frames are read and written without blocking, so large frames
go in both directions at once, and no thread has to be joined at the end.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hocket.processes import reaper, system
from hocket.processes.frames import Frame
from hocket.processes.heartbeat import Position
from hocket.processes.root_cause import ProcessError, RootCause, find_root_cause
from hocket.processes.start import start_module
from hocket.processes.worker import Worker, WorkerSpec

_LOOK_S = 0.1
_CAUSE_S = 0.7
"""Seconds to wait for the root cause, because the failure of one worker makes others fail."""
_EXIT_S = 20.0
"""Seconds to wait for the exit of a worker that has closed its pipe; long, for busy machines."""
_END_TRIES, _END_S = 200, 0.01
_START_FACTOR = 4
"""Timeouts are longer before the first step, because imports of large libraries delay heartbeats.
"""
_MARK = "HOCKET_WORKER_GROUP"


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds without a heartbeat after which a worker counts as stopped."""

    start_s: float = 120.0
    """Limit before the first heartbeat."""
    silence_s: float = 5.0
    """Limit afterwards, if the system also reports no activity of the process."""
    stopped_s: float = 2.0
    """Limit if the system reports that a signal has stopped the process."""


class Message(NamedTuple):
    """A message from a worker."""

    sender: int
    header: dict[str, Any]
    buffers: list[bytearray]


class WorkerGroup:
    """Worker processes of one task; a context manager."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        *,
        timeouts: Timeouts | None = None,
        on_wait: Callable[[Sequence[Position]], None] = lambda positions: None,
    ) -> None:
        """Prepare a group; ``on_wait`` is called from time to time with the positions of the
        workers.
        """
        self._specs, self._timeouts, self._on_wait = specs, timeouts or Timeouts(), on_wait
        self._workers: list[Worker] = []
        self._inbox: deque[Message] = deque()
        self._selector = selectors.PollSelector()
        self._life: tuple[int, int] | None = None
        self._reaper: subprocess.Popen[bytes] | None = None
        self._mark = secrets.token_hex(16)
        self._owner = os.getpid()
        """Process that owns the workers: a forked copy must not end them."""
        self._looked_s = time.monotonic()
        self._memory_kills = system.memory_kills()

    def __enter__(self) -> WorkerGroup:
        self._life = os.pipe()
        try:
            self._start_reaper()
            for spec in self._specs:
                worker = Worker(spec, self._life[0], {_MARK: self._mark})
                self._workers.append(worker)
                self._selector.register(worker.reader.descriptor, selectors.EVENT_READ, worker)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and their descendants."""
        if os.getpid() != self._owner:
            return
        self._selector.close()
        self.kill()
        for worker in self._workers:
            worker.end()
        if self._workers and sys.platform == "linux":
            _end_marked(f"{_MARK}={self._mark}")
        self._workers = []
        self._dismiss_reaper()
        if self._life is not None:
            os.close(self._life[0])
            os.close(self._life[1])
            self._life = None

    def kill(self) -> None:
        """Kill all workers; may be called from any thread, and makes `receive` raise."""
        for worker in self._workers if os.getpid() == self._owner else ():
            worker.process.kill()

    @property
    def process_ids(self) -> list[int]:
        """Process ids in the order of the specs."""
        return [worker.process.pid for worker in self._workers]

    def send(self, index: int, header: dict[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Queue a message for a worker; a large one is written during `receive`."""
        worker = self._workers[index]
        worker.writer.put(header, buffers)
        self._write(worker)

    def receive(self, timeout_s: float = math.inf) -> Message | None:
        """Return the next message; None after ``timeout_s`` or once all workers are done.

        Raises `ProcessError` if a worker has failed.
        """
        until_s = time.monotonic() + timeout_s
        while not self._inbox:
            now_s = time.monotonic()
            if now_s >= until_s or all(worker.is_done for worker in self._workers):
                return None
            if now_s >= self._looked_s + _LOOK_S:
                self._look_after()
            self._exchange(min(_LOOK_S, until_s - now_s))
        return self._inbox.popleft()

    def messages(self) -> Iterator[Message]:
        """Yield messages until all workers are done."""
        while (message := self.receive()) is not None:
            yield message

    # ── one turn of the loop ──

    def _exchange(self, timeout_s: float) -> None:
        """Read and write what is ready, after waiting at most ``timeout_s``."""
        for key, events in self._selector.select(timeout_s):
            worker = key.data
            if key.fd == worker.writer.descriptor:
                self._write(worker)
            elif events:
                self._read(worker)

    def _write(self, worker: Worker) -> None:
        # A dead worker reads nothing; `_look_after` detects its death and reports the cause.
        is_broken = False
        try:
            worker.writer.flush()
        except BrokenPipeError:
            is_broken = True
        is_watched = worker.writer.descriptor in self._selector.get_map()
        has_more = not worker.writer.is_empty and not is_broken
        if has_more and not is_watched:
            self._selector.register(worker.writer.descriptor, selectors.EVENT_WRITE, worker)
        elif is_watched and not has_more:
            self._selector.unregister(worker.writer.descriptor)

    def _read(self, worker: Worker) -> None:
        frame = worker.reader.read()
        if frame is not None:
            self._take(worker, frame)
        elif worker.reader.is_closed:
            self._selector.unregister(worker.reader.descriptor)
            if not worker.is_done:
                raise self._failure()

    def _take(self, worker: Worker, frame: Frame) -> None:
        what = frame.header.get("what")
        if what == "done":
            worker.is_done = True
        elif what == "error":
            worker.error = frame.header
            raise self._failure()
        else:
            self._inbox.append(Message(self._workers.index(worker), *frame))

    # ── liveness and root cause ──

    def _look_after(self) -> None:
        self._looked_s = time.monotonic()
        for worker in self._workers:
            worker.shorten_words()
            if worker.is_done or _has_more_to_say(worker):
                continue
            if worker.process.poll() is not None or self._too_silent_s(worker) is not None:
                raise self._failure()
        self._on_wait([worker.progress.read() for worker in self._workers])

    def _too_silent_s(self, worker: Worker) -> float | None:
        """Seconds since the last heartbeat if that is too long, else None."""
        if worker.is_done or worker.process.poll() is not None:
            return None
        position, limit_s = worker.progress.read(), self._timeouts.silence_s
        if worker.is_stopped:
            limit_s = self._timeouts.stopped_s
        elif not position.step:
            limit_s = _START_FACTOR * limit_s if position.beat_s else self._timeouts.start_s
        silent_s = worker.silent_s
        if silent_s <= limit_s:
            return None
        # Heartbeats come from a separate thread, which does not run either on a busy machine or
        # while an op holds the interpreter lock. So activity that the system reports counts as
        # life.
        return silent_s if worker.is_stopped or not worker.is_at_work else None

    def _failure(self) -> ProcessError:
        """Error of the worker that most likely failed first."""
        since_s = time.monotonic()
        while True:
            # Read before the root cause: a worker that exits between both lines counts as running,
            # and is examined again in the next turn.
            have_ended = all(_has_ended(worker) for worker in self._workers)
            found, waited_s = self._root_cause(), time.monotonic() - since_s
            patience_s = _EXIT_S if found.cause == "unknown" else _CAUSE_S
            if found.is_clear or have_ended or waited_s > patience_s:
                return ProcessError(found)
            for key, _ in self._selector.select(_LOOK_S):
                if key.fd == key.data.writer.descriptor:
                    self._write(key.data)
                else:
                    self._listen_for_cause(key.data)

    def _listen_for_cause(self, worker: Worker) -> None:
        frame = worker.reader.read()
        if frame is not None and frame.header.get("what") == "error":
            worker.error = frame.header
        elif worker.reader.is_closed:
            self._selector.unregister(worker.reader.descriptor)

    def _root_cause(self) -> RootCause:
        ran_out = system.memory_kills() > self._memory_kills
        return find_root_cause([
            worker.observe(self._too_silent_s(worker), memory_ran_out=ran_out)
            for worker in self._workers
        ])  # fmt: skip

    # ── the reaper ──

    def _start_reaper(self) -> None:
        if sys.platform == "linux":
            mark = f"{_MARK}={self._mark}"
            self._reaper = start_module(
                "hocket.processes.reaper",
                [mark, str(os.getpid())],
                output=subprocess.DEVNULL,
                stdin=subprocess.PIPE,
                folder="/",
            )

    def _dismiss_reaper(self) -> None:
        if self._reaper is None:
            return
        assert self._reaper.stdin is not None, "it was started with a pipe"
        with contextlib.suppress(OSError), self._reaper.stdin as pipe:
            pipe.write(reaper.SHUTDOWN)
        self._reaper.kill()
        self._reaper.wait()
        self._reaper = None


def _has_ended(worker: Worker) -> bool:
    """True if the worker has exited and its output was read."""
    return worker.reader.is_closed and worker.process.poll() is not None


def _has_more_to_say(worker: Worker) -> bool:
    """True if unread messages remain, which may explain why the worker has exited."""
    if worker.reader.is_closed:
        return False
    return bool(select.select([worker.reader.descriptor], [], [], 0)[0])


def _end_marked(mark: str) -> None:
    for _ in range(_END_TRIES):
        if system.end_marked(mark):
            return
        time.sleep(_END_S)
