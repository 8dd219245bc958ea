"""One process of a crew, as seen by the one that started it."""

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
from hocket.processes.blame import Sighting
from hocket.processes.frames import FrameReader, FrameWriter
from hocket.processes.progress import Position, SignsOfLife
from hocket.processes.start import start_module

_PIPE_BYTES = 1 << 20
"""What is on its way while nobody listens; the system may give less."""
_MAX_WORDS_BYTES = 1 << 24
"""Of what a process prints; beyond it all but the end is forgotten."""
_LAST_WORDS_BYTES = 1 << 12
_STDOUT, _STDERR = 1, 2


@dataclass(frozen=True, kw_only=True)
class ProcessSpec:
    """A process that is to be started."""

    name: str
    """For people: ``rank 1 (gpu1)``."""
    module: str
    """Run as ``python -m``; it calls `child.live` or `child.serve`."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside ours."""
    folder: str | None = None
    """Where it runs; None: where we do."""
    describe: Callable[[Position], str] = lambda position: ""
    """What it does at a position, for people: ``running op …``."""
    shows_output: bool = False
    """Whether what it prints is shown on our standard error; else its end is kept."""
    has_our_stdout: bool = False
    """Whether what it prints to standard output is shown on ours, where its output is shown."""


class CrewMember:
    """A running process with its pipes."""

    def __init__(self, spec: ProcessSpec, life: int, mark: Mapping[str, str]) -> None:
        self.spec = spec
        self.is_done = False
        self.error: Mapping[str, Any] | None = None
        self.started_s = time.monotonic()
        self._words = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        # So that it can be emptied while others write.
        fcntl.fcntl(self._words, fcntl.F_SETFL, os.O_APPEND)
        self._last_words = b""
        child_in, our_out = _pipe()
        our_in, child_out = _pipe()
        self.reader, self.writer = FrameReader(our_in), FrameWriter(our_out)
        errors = _STDERR if spec.shows_output and sys.__stderr__ else self._words
        is_ours = spec.shows_output and spec.has_our_stdout and sys.__stdout__
        with tempfile.TemporaryFile() as shared:
            shared.truncate(SignsOfLife.SIZE)
            self.progress = SignsOfLife(mmap.mmap(shared.fileno(), SignsOfLife.SIZE))
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
        """Kill the process, stopped or not, and let go of all that belongs to it here."""
        self.process.kill()
        self.process.wait()
        self._close()

    def _close(self) -> None:
        os.close(self.reader.descriptor)
        os.close(self.writer.descriptor)
        self.progress.close()
        self._words.close()

    # ── what is seen of it ──

    def sighting(self, silent_s: float | None, *, memory_ran_out: bool) -> Sighting:
        """All that tells what became of it."""
        return Sighting(
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
        """Whether a signal has stopped the process: then it will not answer, whatever it does."""
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.process.pid, options) is not None
        return False

    @property
    def is_at_work(self) -> bool:
        """Whether some thread runs, wants to run, or waits for the disk: slow is not dead."""
        return system.is_at_work(self.process.pid)

    @property
    def silent_s(self) -> float:
        """How long there has been no sign of life."""
        return time.monotonic() - max(self.progress.read().beat_s, self.started_s)

    def shorten_words(self) -> None:
        """Keep only the end of what a process has printed that prints without end."""
        if os.fstat(self._words.fileno()).st_size > _MAX_WORDS_BYTES:
            self._last_words = self._tail()
            self._words.truncate(0)

    def _last_line(self) -> str:
        """What the process printed last, where there is something."""
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
