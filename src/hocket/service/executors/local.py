"""Runs attempts as processes of this machine, each under a supervisor that outlives the daemon.

All state is in folders (`attempt_folder`), so a new executor on the same folder sees
what an old one started. A supervisor is alive exactly while its lock is held: while that is held, a
result counts for nothing, whoever wrote it. A supervisor that died without a result takes its
commands with it. Processes they left behind are in the control group of the attempt, or have its
mark in the environment. They are killed until none is found; only then the attempt is called lost.
A supervisor without a heartbeat is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hocket.base import config
from hocket.base.errors import RunError, UsageError
from hocket.fleet.rounds.state import FleetDevice
from hocket.processes import system
from hocket.processes.start import start_module
from hocket.service.executors import attempt_folder as files
from hocket.service.executors.attempt_folder import DAMAGED, Result
from hocket.service.executors.attempts import CANNOT_START, Attempts, ended
from hocket.service.executors.cgroups import Cgroup
from hocket.service.executors.executor import (
    EXITED,
    LOST,
    RUNNING,
    STARTING,
    Assignment,
    AttemptName,
    Poll,
    Status,
)
from hocket.service.executors.folders import FolderExecutor
from hocket.service.executors.local_devices import with_cuda
from hocket.service.executors.supervisor import INHERITED

SUPERVISOR_DELAY_S = 5.0
"""A supervisor that has not ended its attempt so long after the grace is stuck, and is killed."""
SILENCE_S = 60.0
"""A supervisor without a heartbeat for so long is halted or hangs: it is killed, and its attempt is
lost."""
MAX_LOOK_S = 2.0
"""The most that one look adds to a silence: after a halt of the whole machine, or of the daemon,
supervisors have time to show that they live."""
COMPLAINTS = "supervisor.err"
MAX_END_LOOKS, END_LOOK_S = 200, 0.05
MAX_SUPERVISORS = 3
"""Tries to start a supervisor that never begins."""


class _Silence(NamedTuple):
    """Time that a supervisor was seen without a new heartbeat."""

    beat: int
    silent_s: float
    looked_s: float


class LocalExecutor(FolderExecutor):
    """An `Executor` for the devices of this machine; ``folder`` is its own and holds its memory."""

    def __init__(
        self, folder: Path, devices: tuple[FleetDevice, ...], *, log_limit_bytes: int = 1 << 30
    ) -> None:
        if sys.platform != "linux":
            raise UsageError(
                "local jobs need Linux", hint="run them on Ray or Slurm: --on ray, --on slurm"
            )
        super().__init__(Attempts(Path(os.path.realpath(folder)), log_limit_bytes))
        self._devices = devices
        self._supervisors: dict[AttemptName, list[subprocess.Popen[bytes]]] = {}
        self._num_supervisors: dict[AttemptName, int] = {}
        """Number of starts that were tried."""
        self._silences: dict[AttemptName, _Silence] = {}

    def start(self, assignment: Assignment) -> None:
        """Begin an attempt, unless one of this name was begun, stopped or forgotten before."""
        name = assignment.name
        if not self._attempts.accept(with_cuda(assignment)):
            return
        settled = (files.STOP, files.BEGUN, files.RESULT)
        is_settled = any((self._attempts.path(name) / one).exists() for one in settled)
        if name not in self._supervisors and not is_settled:
            try:
                self._start_supervisor(name)
            except OSError as error:
                raise RunError(f"cannot start attempt {name}: {error}") from None

    def stop(self, name: AttemptName, grace_s: float) -> None:
        """Have an attempt ended; one that has not begun never will."""
        try:
            if not self._attempts.ask_to_stop(name, grace_s):
                return
        finally:
            # Without the file it takes the grace of its job.
            self._signal_supervisor(self._attempts.path(name), signal.SIGTERM)
        self._end_within(name, grace_s + SUPERVISOR_DELAY_S)

    def kill_all(self) -> None:
        """End all attempts now, also those that nobody knows of any more."""
        for name in self._attempts.names():
            if not (self._attempts.path(name) / files.RESULT).exists():
                self.kill(name)

    def poll(self) -> Poll:
        """Statuses of all attempts; also ends what outlived its supervisor."""
        found = [self._status(name) for name in self._attempts.names()]
        self._reap()
        return Poll(
            attempts=[*self._attempts.refused(), *filter(None, found)], devices=self._devices
        )

    def close(self) -> None:
        """Let go; supervisors and what they run go on."""
        for handles in self._supervisors.values():
            for handle in handles:
                if handle.poll() is None:
                    # The next daemon finds it by its folder; should this process live on, then no
                    # zombie stays.
                    threading.Thread(target=handle.wait, daemon=True).start()
        self._supervisors.clear()

    def _look_at(self, name: AttemptName, folder: Path) -> Status:
        lock = files.try_lock(folder)
        if lock is None:
            self._hurry(name, folder)
            self._fence_silent(name, folder)
            is_running = (folder / files.RUNNING).exists()
            return Status(name=name, phase=RUNNING if is_running else STARTING)
        with _closing(lock):
            result = files.read_result(folder) or self._end_without_supervisor(name, folder)
            if result is None:
                has_begun = (folder / files.BEGUN).exists()
                return Status(name=name, phase=RUNNING if has_begun else STARTING)
            # On a full disk it is found out again, with the same result.
            with contextlib.suppress(OSError):
                files.write_result(folder, result)
            return ended(name, result)

    def _end_without_supervisor(self, name: AttemptName, folder: Path) -> Result | None:
        if (folder / files.BEGUN).exists():
            return self._sweep(folder)
        if (folder / files.STOP).exists():
            return Result(-signal.SIGTERM, "stopped before it began")
        if any(handle.poll() is None for handle in self._supervisors.get(name, ())):
            return None
        if self._num_supervisors.get(name, 0) >= MAX_SUPERVISORS:
            return Result(
                CANNOT_START, f"its supervisor could not be started: {_last_line(folder)}"
            )
        self._start_supervisor(name)
        return None

    def _sweep(self, folder: Path) -> Result | None:
        """Kill what a dead supervisor left; the attempt is over once nothing is found."""
        group = files.read_json(folder / files.CGROUP)
        if group is not None:
            left = Cgroup(**group)
            if not left.kill():
                return None
            left.remove()
        elif not system.end_marked(files.mark_of(folder)):
            return None
        detail = _last_line(folder) or "it was killed"
        return Result(-signal.SIGKILL, f"its supervisor died: {detail}", is_lost=True)

    def _hurry(self, name: AttemptName, folder: Path) -> None:
        """End a supervisor that did not do as it was asked in time, as one that is halted."""
        grace_s = files.asked_grace_s(folder)
        if grace_s is not None and self._is_late(name, grace_s + SUPERVISOR_DELAY_S):
            self._signal_supervisor(folder, signal.SIGKILL)

    def _fence_silent(self, name: AttemptName, folder: Path) -> None:
        """Kill a supervisor that has shown no heartbeat for too long."""
        beat, now_s = files.last_beat(folder), time.monotonic()
        before = self._silences.get(name)
        if before is None or before.beat != beat:
            self._silences[name] = _Silence(beat, 0.0, now_s)
            return
        silent_s = before.silent_s + min(now_s - before.looked_s, MAX_LOOK_S)
        self._silences[name] = _Silence(beat, silent_s, now_s)
        if silent_s > SILENCE_S:
            self._signal_supervisor(folder, signal.SIGKILL)

    def _signal_supervisor(self, folder: Path, number: signal.Signals) -> None:
        # A damaged file names nobody who could be signalled.
        with contextlib.suppress(OSError, *DAMAGED):
            begun = files.read_json(folder / files.BEGUN)
            if begun is not None and begun["boot"] == system.boot():
                system.send(system.Process(begun["pid"], begun["start_ticks"], 0), number)

    def _start_supervisor(self, name: AttemptName) -> None:
        folder = self._attempts.path(name)
        self._num_supervisors[name] = self._num_supervisors.get(name, 0) + 1
        with open(folder / COMPLAINTS, "ab") as complaints:
            handle = start_module(
                "hocket.service.executors.supervisor",
                [str(folder)],
                output=complaints,
                folder="/",
                environment=_for_supervisors(config.environment_anywhere()),
            )
        self._supervisors.setdefault(name, []).append(handle)

    def _reap(self) -> None:
        """Wait for supervisors that ended, so that none stays as a zombie."""
        for name, handles in list(self._supervisors.items()):
            codes = [handle.poll() for handle in handles]
            if None not in codes and not self._attempts.path(name).exists():
                del self._supervisors[name]
                self._num_supervisors.pop(name, None)
        gone = [name for name in self._silences if not self._attempts.path(name).exists()]
        for name in gone:
            del self._silences[name]


def _for_supervisors(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a supervisor, hardly more than that of its job: the job may be able
    to read it, so it must hold no secrets of the daemon."""
    wanted = INHERITED | {"PYTHONPATH"}
    return {
        name: text for name, text in environment.items() if name in wanted or name.startswith("LC_")
    }


def end_set_aside(state_folder: Path) -> None:
    """End what still runs of states that were set aside: their devices are this fleet's now."""
    for folder in sorted(state_folder.glob("damaged-*/attempts")):
        if not _all_ended(LocalExecutor(folder, ())):
            raise RunError(
                "jobs of the state that was set aside cannot be ended",
                hint="end their processes, then serve again",
                where=str(folder),
            )


def _all_ended(executor: LocalExecutor) -> bool:
    for _ in range(MAX_END_LOOKS):
        executor.kill_all()
        if all(status.phase in (EXITED, LOST) for status in executor.poll().attempts):
            return True
        time.sleep(END_LOOK_S)
    return False


def _last_line(folder: Path) -> str:
    """Last line of a supervisor's errors, where there is one."""
    with contextlib.suppress(OSError, IndexError):
        return (folder / COMPLAINTS).read_text(errors="replace").strip().splitlines()[-1][:500]
    return ""


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(descriptor)
