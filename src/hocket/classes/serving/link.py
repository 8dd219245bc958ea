"""The front end's view of one worker: its process, its socket and its counters."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hocket.base.arrays import FloatArray
from hocket.classes.serving.wire import ANSWER, READY, SLOTS, WAKE, InputLayout
from hocket.processes.start import start_module

_KEPT = 4096
"""Number of recent times from which quantiles are computed."""
_MODULE = "hocket.classes.serving.worker"
_PAUSE_S = 0.1
MAX_PAUSE_S = 30.0
"""Maximum pause before a worker that has died repeatedly is started again."""


def recent_times() -> deque[int]:
    """Queue of the last answers' nanoseconds; older ones are dropped."""
    return deque(maxlen=_KEPT)


@dataclass(frozen=True)
class WorkerSpec:
    """Start options of a worker."""

    index: int
    model: bytes
    num_outputs: int
    layout: InputLayout
    memory: int
    """File descriptor of the shared memory."""
    core: int | None
    spin_s: float


@dataclass
class Counts:
    """Counters of a worker's requests."""

    answered: int = 0
    late: int = 0
    deaths: int = 0
    restarts: int = 0
    compute_ns: deque[int] = field(default_factory=recent_times)
    round_trip_ns: deque[int] = field(default_factory=recent_times)


class WorkerLink:
    """A worker process that may die and be started again."""

    def __init__(self, spec: WorkerSpec, on_gone: Callable[[int], None]) -> None:
        """``on_gone`` is called with the descriptor of a socket before it is closed."""
        self.spec = spec
        self._on_gone = on_gone
        self.counts = Counts()
        self.is_ready = False
        self.trouble = ""
        """Reason why the worker's part cannot be served; empty if it can."""
        self.waiting: deque[int] = deque()
        """Numbers of the requests that the worker has not answered."""
        self.channel: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._may_start_s = 0.0
        self._pause_s = _PAUSE_S

    def start(self) -> None:
        """Start the worker process, which reports when it is ready."""
        # SOCK_SEQPACKET keeps message boundaries and order: one message is one request or answer.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        model = os.memfd_create("part")
        try:
            with open(model, "wb", closefd=False) as file:
                file.write(self.spec.model)
            os.lseek(model, 0, os.SEEK_SET)
            options = {
                "socket": theirs.fileno(),
                "memory": self.spec.memory,
                "model": model,
                "core": self.spec.core,
                "spin_s": self.spec.spin_s,
                "shape": self.spec.layout.shape,
                "dtype": self.spec.layout.dtype,
            }
            self.process = start_module(
                _MODULE,
                [json.dumps(options)],
                output=subprocess.DEVNULL,
                descriptors=(theirs.fileno(), self.spec.memory, model),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(model)
            theirs.close()
        ours.setblocking(False)
        self.channel = ours
        self.waiting.clear()

    @property
    def is_alive(self) -> bool:
        """True if the worker can receive requests."""
        return self.is_ready and self.channel is not None

    def send(self, number: int, slot: int) -> bool:
        """Send a request to the worker; False if it is dead or has too many unanswered requests."""
        # The slot of this request would be overwritten before the worker has read it.
        if not self.is_alive or len(self.waiting) >= SLOTS - 1:
            return False
        assert self.channel is not None
        try:
            self.channel.send(WAKE.pack(number, slot))
        except BlockingIOError:
            return False
        except OSError:
            self.bury()
            return False
        self.waiting.append(number)
        return True

    def receive(self) -> tuple[int, int, FloatArray] | None:
        """Next answer (number, nanoseconds, outputs); None if none has arrived."""
        if self.channel is None:
            return None
        try:
            # One number more than expected, so that too many outputs are detected.
            message = self.channel.recv(ANSWER.size + 4 * (self.spec.num_outputs + 1))
        except BlockingIOError:
            return None
        except OSError:  # reset: it died with requests unread
            message = b""
        if not message:
            self.bury()
            return None
        number, spent_ns = ANSWER.unpack_from(message)
        outputs = np.frombuffer(message, dtype=np.float32, offset=ANSWER.size)
        if number == READY:
            if len(outputs) != self.spec.num_outputs:
                self.trouble = (
                    f"part {self.spec.index} gives {len(outputs)} scores, and its classes and "
                    f"others are {self.spec.num_outputs}"
                )
                self.bury()
                return None
            self.is_ready = True
            self._pause_s = _PAUSE_S
            return None
        while self.waiting and self.waiting[0] <= number:
            self.waiting.popleft()
        return number, spent_ns, outputs.astype(np.float64)

    def bury(self) -> None:
        """Close the connection to a dead worker; it may be started again after a pause."""
        if self.channel is not None:
            self.counts.deaths += 1
        self._hang_up()
        self.waiting.clear()
        self._may_start_s = time.monotonic() + self._pause_s
        # The pause doubles after every death, so that a broken part does not occupy a core all the
        # time.
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _hang_up(self) -> None:
        if self.channel is not None:
            self._on_gone(self.channel.fileno())
            self.channel.close()
            self.channel = None
        self.is_ready = False

    def start_again(self) -> bool:
        """Restart a dead worker if its pause is over."""
        if self.channel is not None or time.monotonic() < self._may_start_s:
            return False
        self.end()
        self.counts.restarts += 1
        self.start()
        return True

    def end(self) -> None:
        """End the worker process if it runs."""
        self._hang_up()
        if self.process is not None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.process = None
