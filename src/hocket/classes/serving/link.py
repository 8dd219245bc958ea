"""One worker as the front end sees it: its process, its socket, and what is known of it."""

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
"""Times that are kept for quantiles."""
_MODULE = "hocket.classes.serving.worker"
_PAUSE_S = 0.1
MAX_PAUSE_S = 30.0
"""Before a worker that died again and again is started once more."""


def recent_times() -> deque[int]:
    """Nanoseconds of the last answers; older ones are dropped."""
    return deque(maxlen=_KEPT)


@dataclass(frozen=True)
class WorkerSpec:
    """Start options of a worker."""

    index: int
    model: bytes
    num_outputs: int
    layout: InputLayout
    memory: int
    """Descriptor of the shared memory."""
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
    """A worker that may die and be started again."""

    def __init__(self, spec: WorkerSpec, on_gone: Callable[[int], None]) -> None:
        """``on_gone`` gets the descriptor of a socket before it is closed."""
        self.spec = spec
        self._on_gone = on_gone
        self.counts = Counts()
        self.is_ready = False
        self.trouble = ""
        """Why its part cannot be served."""
        self.waiting: deque[int] = deque()
        """Requests that it has not answered."""
        self.channel: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self._may_start_s = 0.0
        self._pause_s = _PAUSE_S

    def start(self) -> None:
        """Start the process; it says when it is ready."""
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
        """True if it can be sent requests."""
        return self.is_ready and self.channel is not None

    def send(self, number: int, slot: int) -> bool:
        """Wake it for a request; False where it is dead or too far behind."""
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
        """Next message: number, nanoseconds, outputs; None where it is dead or silent."""
        if self.channel is None:
            return None
        try:
            # One number more than expected, so that too many are noticed.
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
        """Give up a dead worker; it may be started again after a pause."""
        if self.channel is not None:
            self.counts.deaths += 1
        self._hang_up()
        self.waiting.clear()
        self._may_start_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)

    def _hang_up(self) -> None:
        if self.channel is not None:
            self._on_gone(self.channel.fileno())
            self.channel.close()
            self.channel = None
        self.is_ready = False

    def start_again(self) -> bool:
        """Start a dead worker anew if its pause is over."""
        if self.channel is not None or time.monotonic() < self._may_start_s:
            return False
        self.end()
        self.counts.restarts += 1
        self.start()
        return True

    def end(self) -> None:
        """End the process, if there is one."""
        self._hang_up()
        if self.process is not None:
            self.process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
            self.process = None
