"""A worker process of a group, as its parent handles it: pipes, heartbeat, captured output."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hocket.base import config
from hocket.processes import system
from hocket.processes.frames import FrameReader, FrameWriter
from hocket.processes.heartbeat import Heartbeat, Position
from hocket.processes.root_cause import Observation
from hocket.processes.start import start_module

_PIPE_BYTES = 1 << 20
"""Requested capacity of a pipe; the system may grant less."""
_MAX_WORDS_BYTES = 1 << 24
"""Maximum size of captured output; of longer output only the end is retained."""
_LAST_WORDS_BYTES = 1 << 12
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """Specification of a worker to start."""

    name: str
    """Display name: ``rank 1 (gpu1)``."""
    module: str
    """Module to run with ``python -m``; it calls `child.live` or `child.serve`."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to the environment of this process."""
    folder: str | None = None
    """Working directory; None means that of this process."""
    describe: Callable[[Position], str] = lambda position: ""
    """Function that describes the activity at a position for messages, such as ``running op …``."""
    shows_output: bool = False
    """True to pass output to our standard error; otherwise only its end is captured."""
    has_our_stdout: bool = False
    """True to pass standard output to ours, if output is shown at all."""


class Worker:
    """A running process with its pipes."""

    def __init__(self, spec: WorkerSpec, life: int, mark: Mapping[str, str]) -> None:
        self.spec = spec
        self.is_done = False
        self.error: Mapping[str, Any] | None = None
        self.started_s = time.monotonic()
        self._words = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        # With O_APPEND, writers continue at the new end after the file is truncated.
        fcntl.fcntl(self._words, fcntl.F_SETFL, os.O_APPEND)
        self._last_words = b""
        child_in, our_out = _pipe()
        our_in, child_out = _pipe()
        self.reader, self.writer = FrameReader(our_in), FrameWriter(our_out)
        errors = _STDERR if spec.shows_output and sys.__stderr__ else self._words
        is_ours = spec.shows_output and spec.has_our_stdout and sys.__stdout__
        with tempfile.TemporaryFile() as shared:
            shared.truncate(Heartbeat.SIZE)
            self.progress = Heartbeat(mmap.mmap(shared.fileno(), Heartbeat.SIZE))
            given = (child_in, child_out, shared.fileno(), life)
            try:
                self.process = start_module(
                    spec.module,
                    [",".join(map(str, (*given, os.getpid()))), *spec.arguments],
                    output=_STDOUT if is_ours else errors,
                    errors=errors,
                    folder=spec.folder,
                    environment={**config.environment_anywhere(), **spec.environment, **mark},
                    descriptors=given,
                )
            except BaseException:
                self._close()
                raise
            finally:
                os.close(child_in)
                os.close(child_out)
        for descriptor in (our_in, our_out):
            os.set_blocking(descriptor, False)

    def end(self) -> None:
        """Kill the process and release its pipes and memory."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        os.close(self.reader.descriptor)
        os.close(self.writer.descriptor)
        self.progress.close()
        self._words.close()

    # ── what is seen of it ──

    def observe(self, silent_s: float | None, *, memory_ran_out: bool) -> Observation:
        """State that determines the root cause of a failure."""
        return Observation(
            name=self.spec.name,
            doing=self.spec.describe(self.progress.read()),
            exit_code=self.process.poll(),
            error=self.error,
            is_done=self.is_done,
            silent_s=silent_s,
            last_words=self._last_line(),
            memory_ran_out=memory_ran_out,
        )

    @property
    def is_stopped(self) -> bool:
        """True if a signal has stopped the process, so that it cannot answer."""
        # WNOWAIT leaves the state in place, so that later calls and `poll` still see it.
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, options) is not None
        return False

    @property
    def is_at_work(self) -> bool:
        """True if a thread of the process runs, is runnable or waits for the disk."""
        return system.is_at_work(self.process.pid)

    @property
    def silent_s(self) -> float:
        """Seconds since the last heartbeat."""
        return time.monotonic() - max(self.progress.read().beat_s, self.started_s)

    def shorten_words(self) -> None:
        """Drop all but the end of very long output."""
        if os.fstat(self._words.fileno()).st_size > _MAX_WORDS_BYTES:
            self._last_words = self._tail()
            self._words.truncate(0)

    def _last_line(self) -> str:
        """Return the last line of its output; empty if there is none."""
        lines = (self._last_words + self._tail()).decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def _tail(self) -> bytes:
        size = os.fstat(self._words.fileno()).st_size
        return os.pread(self._words.fileno(), _LAST_WORDS_BYTES, max(0, size - _LAST_WORDS_BYTES))


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    with contextlib.suppress(AttributeError, OSError):
        fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    return read, write
