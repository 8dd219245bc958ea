"""Start one process per rank, watch them, and leave nothing behind.

A rank that ends early, says that it failed, or gives no sign of life is named with its device and
with what it was doing; then all ranks are killed. Ranks hold no file, listen on loopback only, and
end by themselves when this process is gone.
"""

from __future__ import annotations

import mmap
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from hocket.base.errors import RunError
from hocket.runtime.options import SILENCE_S
from hocket.runtime.progress import Position, Progress
from hocket.runtime.wire import read_frame, write_frame

START_LIMIT_S = 120.0
"""Within this time a process must show its first sign of life."""
STOPPED_S = 2.0
"""The same for a rank of which the system says that it is stopped, whatever it was doing."""
_START_PATIENCE = 4
"""How many times as long before the first step."""
_LOOK_S = 0.1
_MAX_WAITING = 64
"""Messages that wait to be looked at: ranks do not run far ahead of who reads the output."""
_CAUSE_S = 0.7
"""The failure of one rank makes others fail: how long to wait for the first cause to show."""

Message = tuple[dict[str, Any], list[bytearray]]


@dataclass
class RankSpec:
    """What one rank is told, and how it is called."""

    device_name: str
    header: dict[str, Any]
    buffers: Sequence[Any]
    describe: Callable[[Position], str]
    """What a rank does at a position, for people: ``running op …``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    program: str = "hocket.runtime.rank"
    """The module that a rank runs."""


class _Rank:
    """One process with its pipes."""

    def __init__(self, number: int, spec: RankSpec, life_fd: int, inbox: Any) -> None:
        self.number, self.spec, self.inbox = number, spec, inbox
        self.is_done = False
        self.error: dict[str, Any] | None = None
        self.started_s = time.monotonic()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        spec_read, spec_write = os.pipe()
        result_read, result_write = os.pipe()
        with tempfile.TemporaryFile() as shared:
            shared.truncate(Progress.SIZE)
            self.progress = Progress(mmap.mmap(shared.fileno(), Progress.SIZE))
            given = (spec_read, result_write, shared.fileno(), life_fd)
            self.process = subprocess.Popen(
                [sys.executable, "-m", spec.program, *map(str, given)],
                pass_fds=given,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, **spec.environment},
                # Ctrl-C in a terminal reaches the supervisor only, which then ends the ranks.
                start_new_session=True,
            )
        os.close(spec_read)
        os.close(result_write)
        self._spec_stream = os.fdopen(spec_write, "wb")
        self._result_stream = os.fdopen(result_read, "rb", buffering=0)
        self.threads = [
            threading.Thread(target=self._tell, args=(self._spec_stream,), daemon=True),
            threading.Thread(target=self._listen, args=(self._result_stream,), daemon=True),
        ]
        for thread in self.threads:
            thread.start()

    def _tell(self, stream: BinaryIO) -> None:
        # A rank that has died reads nothing; its death is noticed elsewhere.
        with suppress(BrokenPipeError), stream:
            write_frame(stream, self.spec.header, self.spec.buffers)

    def _listen(self, stream: Any) -> None:
        while (frame := read_frame(stream)) is not None:
            self.inbox.put((self.number, frame))
        self.inbox.put((self.number, None))

    def kill(self) -> None:
        """End the process, stopped or not, and everything that belongs to it here."""
        self.process.kill()
        self.process.wait()
        while any(thread.is_alive() for thread in self.threads):
            # Whoever listens may stand before a full inbox.
            with suppress(queue.Empty):
                self.inbox.get(timeout=_LOOK_S / 10)
        self._result_stream.close()
        self._errors.close()
        self.progress.close()

    def last_words(self) -> str:
        """The last line that the process wrote to its standard error, where there is one."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    @property
    def label(self) -> str:
        return f"rank {self.number} ({self.spec.device_name})"

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process: then it will not answer, whatever it does."""
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, options) is not None
        return False

    @property
    def is_at_work(self) -> bool:
        """Whether some thread runs, wants to run, or waits for the disk: slow is not dead."""
        with suppress(OSError):
            for task in Path(f"/proc/{self.process.pid}/task").iterdir():
                # The name of a thread may hold anything; its state stands behind the last bracket.
                state = (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                if state in "RD":
                    return True
        return False

    def silent_s(self) -> float:
        """How long there has been no sign of life."""
        return time.monotonic() - max(self.progress.read().beat_s, self.started_s)


class Supervisor:
    """The ranks of one run; use it as a context."""

    def __init__(
        self,
        specs: Sequence[RankSpec],
        *,
        silence_s: float = SILENCE_S,
        on_wait: Callable[[Sequence[Position]], None] = lambda positions: None,
    ) -> None:
        """``on_wait`` is told where the ranks are whenever none has anything to report."""
        self._specs, self._silence_s, self._on_wait = specs, silence_s, on_wait
        self._inbox: queue.Queue[tuple[int, Message | None]] = queue.Queue(_MAX_WAITING)
        self._ranks: list[_Rank] = []
        self._life: tuple[int, int] | None = None

    def __enter__(self) -> Supervisor:
        self._life = os.pipe()
        try:
            for number, spec in enumerate(self._specs):
                self._ranks.append(_Rank(number, spec, self._life[0], self._inbox))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.kill()
        if self._life is not None:
            os.close(self._life[0])
            os.close(self._life[1])
            self._life = None

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks, in order."""
        return [rank.process.pid for rank in self._ranks]

    def messages(self) -> Iterator[tuple[int, dict[str, Any], list[bytearray]]]:
        """What ranks report, until all are done; raises `RunError` where one fails."""
        while not all(rank.is_done for rank in self._ranks):
            try:
                number, frame = self._inbox.get(timeout=_LOOK_S)
            except queue.Empty:
                self._look_after()
                self._on_wait([rank.progress.read() for rank in self._ranks])
                continue
            message = self._take(number, frame)
            if message is not None:
                yield number, *message

    def _take(self, number: int, frame: Message | None) -> Message | None:
        """A message for the caller; None where it is about the rank itself."""
        rank = self._ranks[number]
        what = frame[0]["what"] if frame is not None else "end"
        if what == "done":
            rank.is_done = True
        elif what == "error" and frame is not None:
            rank.error = frame[0]
            raise self._failure()
        elif what == "end" and not rank.is_done:
            raise self._failure()
        return frame if what not in ("done", "end") else None

    def _look_after(self) -> None:
        for rank in self._ranks:
            if not rank.is_done and (rank.process.poll() is not None or self._is_silent(rank)):
                raise self._failure()

    def _is_silent(self, rank: _Rank) -> bool:
        position, limit_s = rank.progress.read(), self._silence_s
        if rank.is_stopped:
            limit_s = STOPPED_S
        elif not position.step:
            # Loading large libraries keeps a process from showing that it lives.
            limit_s = _START_PATIENCE * limit_s if position.beat_s else START_LIMIT_S
        if rank.silent_s() <= limit_s:
            return False
        # The sign of life comes from a thread of its own, but on a busy machine, or beside an op
        # that keeps the interpreter to itself, that thread does not get its turn either.
        return rank.is_stopped or not rank.is_at_work

    # ── who is to blame ──────────────────────────────────────────────────────────────────────

    def _failure(self) -> RunError:
        """The error for the rank that failed first, as far as can be told."""
        until_s = time.monotonic() + _CAUSE_S
        while time.monotonic() < until_s and not self._has_cause():
            with suppress(queue.Empty):
                number, frame = self._inbox.get(timeout=_LOOK_S)
                if frame is not None and frame[0]["what"] == "error":
                    self._ranks[number].error = frame[0]
        return max((self._verdict(rank) for rank in self._ranks), key=lambda verdict: verdict[0])[1]

    def _has_cause(self) -> bool:
        return any(self._verdict(rank)[0] >= _CLEAR for rank in self._ranks)

    def _verdict(self, rank: _Rank) -> tuple[int, RunError]:
        """How likely a rank is the cause, and what to say then."""
        position = rank.progress.read()
        doing = rank.spec.describe(position)
        code = rank.process.poll()
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            hint = _KILLED if -code == signal.SIGKILL else ""
            text = f"{rank.label} was killed by signal {-code} ({name}) while {doing}"
            return _CLEAR + 2, RunError(text, hint=hint)
        if rank.error is not None and rank.error["kind"] != "communication":
            text = f"{rank.label} failed while {doing}: {rank.error['message']}"
            return _CLEAR + 1, RunError(text)
        if not rank.is_done and code is None and self._is_silent(rank):
            text = f"{rank.label} has stopped answering for {rank.silent_s():.0f} s while {doing}"
            return _CLEAR, RunError(text)
        if code is not None and not rank.is_done and rank.error is None:
            text = f"{rank.label} ended with code {code} while {doing}{rank.last_words()}"
            return _CLEAR - 1, RunError(text)
        message = rank.error["message"] if rank.error is not None else "unknown failure"
        return int(rank.error is not None), RunError(f"{rank.label}: {message} while {doing}")


_CLEAR = 10
"""Verdicts from here on name a cause, not a consequence."""
_KILLED = "the system kills a process that takes too much memory; the kernel's log tells"
