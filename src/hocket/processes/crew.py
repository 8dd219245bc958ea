"""Several processes that do one piece of work, and the one loop that listens to them.

Everything happens in the thread that calls: frames are read and written without blocking, so big
ones go both ways at once, and nobody has to be joined at the end.
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
from typing import Any, NamedTuple

from hocket.processes import keeper, system
from hocket.processes.blame import Blame, ProcessError, blame
from hocket.processes.frames import Frame
from hocket.processes.member import CrewMember, ProcessSpec
from hocket.processes.patience import Patience
from hocket.processes.progress import Position
from hocket.processes.start import start_module

_LOOK_S = 0.1
_CAUSE_S = 0.7
"""The failure of one process makes others fail: how long to wait for the first cause to show."""
_EXIT_S = 20.0
"""How long to wait, where nothing is known yet, for the exit of a process that has closed its pipe:
on a busy machine that is no moment."""
_END_TRIES, _END_S = 200, 0.01
_START_PATIENCE = 4
"""How many times as long before the first step: loading large libraries keeps a process from
showing that it lives."""
_MARK = "HOCKET_CREW"


class Heard(NamedTuple):
    """What a process says."""

    sender: int
    header: dict[str, Any]
    buffers: list[bytearray]


class Crew:
    """The processes of one piece of work; use it as a context."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        *,
        patience: Patience | None = None,
        on_wait: Callable[[Sequence[Position]], None] = lambda positions: None,
    ) -> None:
        """``on_wait`` is told now and then where the processes are."""
        self._specs, self._patience, self._on_wait = specs, patience or Patience(), on_wait
        self._members: list[CrewMember] = []
        self._inbox: deque[Heard] = deque()
        self._selector = selectors.PollSelector()
        self._life: tuple[int, int] | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._mark = secrets.token_hex(16)
        self._owner = os.getpid()
        """A forked process must not end what is not its own."""
        self._looked_s = time.monotonic()
        self._memory_kills = system.memory_kills()

    def __enter__(self) -> Crew:
        self._life = os.pipe()
        try:
            self._start_keeper()
            for spec in self._specs:
                member = CrewMember(spec, self._life[0], {_MARK: self._mark})
                self._members.append(member)
                self._selector.register(member.reader.descriptor, selectors.EVENT_READ, member)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all processes, and all that descends from them."""
        if os.getpid() != self._owner:
            return
        self._selector.close()
        self.kill()
        for member in self._members:
            member.end()
        if self._members and sys.platform == "linux":
            _end_marked(f"{_MARK}={self._mark}")
        self._members = []
        self._dismiss_keeper()
        if self._life is not None:
            os.close(self._life[0])
            os.close(self._life[1])
            self._life = None

    def kill(self) -> None:
        """Make all processes end; any thread may call this, and whoever listens is told."""
        for member in self._members if os.getpid() == self._owner else ():
            member.process.kill()

    @property
    def process_ids(self) -> list[int]:
        """In the order of the specs."""
        return [member.process.pid for member in self._members]

    def tell(self, index: int, header: dict[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Say something to a process; what does not fit on the way goes out while we `hear`."""
        member = self._members[index]
        member.writer.put(header, buffers)
        self._write(member)

    def hear(self, timeout_s: float = math.inf) -> Heard | None:
        """What a process says next; None after ``timeout_s``, or where all have done their work.

        Raises `ProcessError` where one has failed.
        """
        until_s = time.monotonic() + timeout_s
        while not self._inbox:
            now_s = time.monotonic()
            if now_s >= until_s or all(member.is_done for member in self._members):
                return None
            if now_s >= self._looked_s + _LOOK_S:
                self._look_after()
            self._exchange(min(_LOOK_S, until_s - now_s))
        return self._inbox.popleft()

    def messages(self) -> Iterator[Heard]:
        """What is said until all have done their work."""
        while (message := self.hear()) is not None:
            yield message

    # ── one turn of the loop ──

    def _exchange(self, timeout_s: float) -> None:
        """Take and give what can be taken and given now; wait for it if need be."""
        for key, events in self._selector.select(timeout_s):
            member = key.data
            if key.fd == member.writer.descriptor:
                self._write(member)
            elif events:
                self._read(member)

    def _write(self, member: CrewMember) -> None:
        # One that has died reads nothing; its death is noticed elsewhere.
        is_broken = False
        try:
            member.writer.flush()
        except BrokenPipeError:
            is_broken = True
        is_watched = member.writer.descriptor in self._selector.get_map()
        has_more = not member.writer.is_empty and not is_broken
        if has_more and not is_watched:
            self._selector.register(member.writer.descriptor, selectors.EVENT_WRITE, member)
        elif is_watched and not has_more:
            self._selector.unregister(member.writer.descriptor)

    def _read(self, member: CrewMember) -> None:
        frame = member.reader.read()
        if frame is not None:
            self._take(member, frame)
        elif member.reader.is_closed:
            self._selector.unregister(member.reader.descriptor)
            if not member.is_done:
                raise self._failure()

    def _take(self, member: CrewMember, frame: Frame) -> None:
        what = frame.header.get("what")
        if what == "done":
            member.is_done = True
        elif what == "error":
            member.error = frame.header
            raise self._failure()
        else:
            self._inbox.append(Heard(self._members.index(member), *frame))

    # ── who lives, and who is to blame ──

    def _look_after(self) -> None:
        self._looked_s = time.monotonic()
        for member in self._members:
            member.shorten_words()
            if member.is_done or _has_more_to_say(member):
                continue
            if member.process.poll() is not None or self._too_silent_s(member) is not None:
                raise self._failure()
        self._on_wait([member.progress.read() for member in self._members])

    def _too_silent_s(self, member: CrewMember) -> float | None:
        """How long a process has given no sign of life, where that is too long."""
        if member.is_done or member.process.poll() is not None:
            return None
        position, limit_s = member.progress.read(), self._patience.silence_s
        if member.is_stopped:
            limit_s = self._patience.stopped_s
        elif not position.step:
            limit_s = _START_PATIENCE * limit_s if position.beat_s else self._patience.start_s
        silent_s = member.silent_s
        if silent_s <= limit_s:
            return None
        # The sign of life comes from a thread of its own, but on a busy machine, or beside an op
        # that keeps the interpreter to itself, that thread does not get its turn either.
        return silent_s if member.is_stopped or not member.is_at_work else None

    def _failure(self) -> ProcessError:
        """The error for the process that failed first, as far as can be told."""
        since_s = time.monotonic()
        while True:
            # Looked at before blaming: one that ends in between is blamed for how it ended.
            have_ended = all(_has_ended(member) for member in self._members)
            found, waited_s = self._blame(), time.monotonic() - since_s
            patience_s = _EXIT_S if found.cause == "unknown" else _CAUSE_S
            if found.is_clear or have_ended or waited_s > patience_s:
                return ProcessError(found)
            for key, _ in self._selector.select(_LOOK_S):
                if key.fd == key.data.writer.descriptor:
                    self._write(key.data)
                else:
                    self._listen_for_cause(key.data)

    def _listen_for_cause(self, member: CrewMember) -> None:
        frame = member.reader.read()
        if frame is not None and frame.header.get("what") == "error":
            member.error = frame.header
        elif member.reader.is_closed:
            self._selector.unregister(member.reader.descriptor)

    def _blame(self) -> Blame:
        ran_out = system.memory_kills() > self._memory_kills
        return blame([
            member.sighting(self._too_silent_s(member), memory_ran_out=ran_out)
            for member in self._members
        ])  # fmt: skip

    # ── what is left ──

    def _start_keeper(self) -> None:
        if sys.platform == "linux":
            mark = f"{_MARK}={self._mark}"
            self._keeper = start_module(
                "hocket.processes.keeper",
                [mark, str(os.getpid())],
                output=subprocess.DEVNULL,
                stdin=subprocess.PIPE,
                folder="/",
            )

    def _dismiss_keeper(self) -> None:
        if self._keeper is None:
            return
        assert self._keeper.stdin is not None, "it was started with a pipe"
        with contextlib.suppress(OSError), self._keeper.stdin as farewell:
            farewell.write(keeper.FAREWELL)
        self._keeper.kill()
        self._keeper.wait()
        self._keeper = None


def _has_ended(member: CrewMember) -> bool:
    """Whether nothing more will be known of a process."""
    return member.reader.is_closed and member.process.poll() is not None


def _has_more_to_say(member: CrewMember) -> bool:
    """Whether something is on its way; a process that has said all may be gone for good."""
    if member.reader.is_closed:
        return False
    return bool(select.select([member.reader.descriptor], [], [], 0)[0])


def _end_marked(mark: str) -> None:
    for _ in range(_END_TRIES):
        if system.end_marked(mark):
            return
        time.sleep(_END_S)
